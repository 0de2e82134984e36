"""Data that is computed, not downloaded: every sample a function of (seed, index), with a known best score.

clicks   click logs in the shape of Criteo's     `best_auc`
images   striped discs, a direction per class
text     characters from a planted rule          `best_loss`
"""

from __future__ import annotations

from shoal.data.generated.click_log import best_auc, click_arrays, clicks
from shoal.data.generated.gratings import images
from shoal.data.generated.markov_text import ALPHABET, best_loss, decode, text

__all__ = ["ALPHABET", "best_auc", "best_loss", "click_arrays", "clicks", "decode", "images", "text"]
