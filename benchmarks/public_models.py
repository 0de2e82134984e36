"""Public models with random weights, as small as their configurations allow, and batches for them.

From transformers, timm, torchvision and deepctr-torch, unmodified: what people
bring. A package that is not installed leaves its models out.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

NUM_SAMPLES, LENGTH, WORDS, CLASSES = 11, 12, 96, 12
"""In batches of 8 the last has 3, which three workers share."""


@dataclass(frozen=True)
class Case:
    """One model with what it is trained on."""

    package: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Any = "model"
    tolerance: float = 1e-9
    """Largest difference to one process that counts as equal; larger where the model computes in float32 whatever its weights are."""

    mixes: bool = False
    """Its layers mix the batch (BatchNorm): one process runs the workers' slices in turn."""

    draws: bool = False
    """It draws random numbers (dropout): one process also runs a pipeline's micro-batches in turn."""


def import_torchvision() -> Any:
    """Import torchvision, whose wheel on PyPI is built for CUDA: with a CPU torch its operators are missing.

    None of its classifiers needs them; only descriptions of them are registered while it is imported.
    """
    registered = torch.library.register_fake

    def register(name: Any, *args: Any, **settings: Any) -> Any:
        is_missing = isinstance(name, str) and name.startswith("torchvision::")
        return (lambda function: function) if is_missing else registered(name, *args, **settings)

    torch.library.register_fake = register  # type: ignore[assignment]
    try:
        return importlib.import_module("torchvision")
    finally:
        torch.library.register_fake = registered


def _whole(*shape: int, below: int, seed: int) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def _numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _text() -> dict[str, Tensor]:
    """Words, a mask of the first so many, and labels of which some are ignored: more in some samples than in others."""
    ids = _whole(NUM_SAMPLES, LENGTH, below=WORDS - 4, seed=1) + 4
    lengths = 4 + torch.arange(NUM_SAMPLES) * 3 % (LENGTH - 3)
    mask = torch.arange(LENGTH) < lengths[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.where(mask, ids, -100)}


def _classified_text() -> dict[str, Tensor]:
    return {**_text(), "labels": torch.arange(NUM_SAMPLES) % CLASSES}


def _pixels(size: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {
        "pixel_values": _numbers(NUM_SAMPLES, 3, size, size, seed=2),
        "labels": torch.arange(NUM_SAMPLES) % CLASSES,
    }


def _images(size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (_numbers(NUM_SAMPLES, 3, size, size, seed=2), torch.arange(NUM_SAMPLES) % CLASSES)


def _spectrogram() -> dict[str, Tensor]:
    return {
        "input_values": _numbers(NUM_SAMPLES, 32, 16, seed=3),
        "labels": torch.arange(NUM_SAMPLES) % CLASSES,
    }


def _speech() -> dict[str, Tensor]:
    return {
        "input_values": _numbers(NUM_SAMPLES, 400, seed=4),
        "labels": _whole(NUM_SAMPLES, 5, below=20, seed=5) + 1,
    }


def _clicks() -> tuple[Tensor, Tensor]:
    columns = [_whole(NUM_SAMPLES, 1, below=9, seed=20 + number) for number in range(6)]
    dense = [_numbers(NUM_SAMPLES, 1, seed=40 + number) for number in range(4)]
    clicked = (torch.arange(NUM_SAMPLES) % 3 == 0).double()
    return torch.cat([*(column.double() for column in columns), *dense], 1), clicked[:, None]


_SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 48,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_STEADY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_FLOAT32_LOSS = 2e-6


def _transformer(model: str, batch: Callable[[], Any], *, config: str | None = None, **settings: Any) -> Case:
    """A class of transformers by name, its configuration by settings of its own."""
    known = {key: settings.pop(key) for key in ("tolerance", "mixes", "draws", "loss") if key in settings}

    def build() -> nn.Module:
        package = importlib.import_module("transformers")
        kind = getattr(package, model)
        built: nn.Module = kind(kind.config_class(**settings))
        return built

    return Case("transformers", build, batch, **known)


def _timm(name: str, size: int, **settings: Any) -> Case:
    known = {key: settings.pop(key) for key in ("tolerance", "mixes", "draws") if key in settings}

    def build() -> nn.Module:
        model: nn.Module = importlib.import_module("timm").create_model(name, num_classes=CLASSES, **settings)
        return model

    return Case("timm", build, _images(size), nn.CrossEntropyLoss(), **known)


def _torchvision(name: str, size: int, **settings: Any) -> Case:
    known = {key: settings.pop(key) for key in ("tolerance", "mixes", "draws") if key in settings}

    def build() -> nn.Module:
        models = importlib.import_module("torchvision.models")
        model: nn.Module = getattr(models, name)(num_classes=CLASSES, **settings)
        return model

    return Case("torchvision", build, _images(size), nn.CrossEntropyLoss(), **known)


def _deepctr(name: str, **settings: Any) -> Case:
    def build() -> nn.Module:
        inputs = importlib.import_module("deepctr_torch.inputs")
        columns = [inputs.SparseFeat(f"c{n}", vocabulary_size=9, embedding_dim=4) for n in range(6)]
        columns += [inputs.DenseFeat(f"d{n}", 1) for n in range(4)]
        models = importlib.import_module("deepctr_torch.models")
        kind = getattr(models, name)
        model: nn.Module = kind(columns, columns, dnn_hidden_units=(24, 12), **settings)
        return model

    return Case("deepctr_torch", build, _clicks, nn.BCELoss())


CASES: dict[str, Case] = {
    "bert": _transformer("BertForMaskedLM", _text, **_SIZES, draws=True),
    "bert classifier": _transformer("BertForSequenceClassification", _classified_text, **_SIZES, **_STEADY, num_labels=CLASSES),
    "roberta": _transformer("RobertaForMaskedLM", _text, **_SIZES, **_STEADY),
    "distilbert": _transformer(
        "DistilBertForSequenceClassification", _classified_text, dim=24, n_layers=3, n_heads=6, hidden_dim=48,
        vocab_size=WORDS, max_position_embeddings=32, num_labels=CLASSES, dropout=0.0, attention_dropout=0.0,
        seq_classif_dropout=0.0,
    ),
    "electra": _transformer("ElectraForMaskedLM", _text, **_SIZES, **_STEADY, embedding_size=12),
    "albert": _transformer(
        "AlbertForMaskedLM", _text, **_SIZES, **_STEADY, embedding_size=12, classifier_dropout_prob=0.0
    ),
    "gpt2": _transformer(
        "GPT2LMHeadModel", _text, vocab_size=WORDS, n_positions=32, n_embd=24, n_layer=3, n_head=6, bos_token_id=1,
        eos_token_id=2, tolerance=_FLOAT32_LOSS, draws=True,
    ),
    "gpt neox": _transformer("GPTNeoXForCausalLM", _text, **_SIZES, tolerance=_FLOAT32_LOSS),
    "opt": _transformer(
        "OPTForCausalLM", _text, hidden_size=24, word_embed_proj_dim=24, ffn_dim=48, num_hidden_layers=3,
        num_attention_heads=6, vocab_size=WORDS, max_position_embeddings=32, dropout=0.0, pad_token_id=0,
        tolerance=_FLOAT32_LOSS,
    ),
    "llama": _transformer("LlamaForCausalLM", _text, **_SIZES, num_key_value_heads=6, tolerance=_FLOAT32_LOSS),
    "mistral": _transformer("MistralForCausalLM", _text, **_SIZES, num_key_value_heads=6, tolerance=_FLOAT32_LOSS),
    "qwen2": _transformer("Qwen2ForCausalLM", _text, **_SIZES, num_key_value_heads=6, tie_word_embeddings=True, tolerance=_FLOAT32_LOSS),
    "t5": _transformer(
        "T5ForConditionalGeneration", _text, d_model=24, d_kv=4, d_ff=48, num_layers=2, num_heads=6, vocab_size=WORDS,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, tolerance=_FLOAT32_LOSS,
    ),
    "bart": _transformer(
        "BartForConditionalGeneration", _text, d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=6,
        decoder_attention_heads=6, encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=WORDS, max_position_embeddings=32,
        dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
    ),
    "vit": _transformer(
        "ViTForImageClassification", _pixels(16), hidden_size=24, num_hidden_layers=3, num_attention_heads=6,
        intermediate_size=48, image_size=16, patch_size=4, num_labels=CLASSES,
    ),
    "swin": _transformer(
        "SwinForImageClassification", _pixels(32), embed_dim=12, depths=(2, 2), num_heads=(3, 6), image_size=32,
        patch_size=4, window_size=4, num_labels=CLASSES, drop_path_rate=0.0,
    ),
    "convnext": _transformer(
        "ConvNextForImageClassification", _pixels(32), hidden_sizes=(6, 12, 18, 24), depths=(1, 1, 2, 1),
        num_labels=CLASSES,
    ),
    "audio spectrogram transformer": _transformer(
        "ASTForAudioClassification", _spectrogram, hidden_size=24, num_hidden_layers=3, num_attention_heads=6,
        intermediate_size=48, num_mel_bins=16, max_length=32, patch_size=8, frequency_stride=8, time_stride=8,
        num_labels=CLASSES,
    ),
    "wav2vec2": _transformer(
        "Wav2Vec2ForCTC", _speech, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, intermediate_size=48,
        vocab_size=24, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False, ctc_loss_reduction="mean",
        ctc_zero_infinity=True, tolerance=_FLOAT32_LOSS,
    ),
    "timm resnet": _timm("test_resnet", 64, mixes=True),
    "timm vit": _timm("vit_tiny_patch16_224", 32, img_size=32, embed_dim=24, depth=3, num_heads=6),
    "timm efficientnet": _timm("test_efficientnet", 64, mixes=True),
    "timm convnext": _timm("convnext_atto", 32, depths=(1, 1, 2, 1), dims=(6, 12, 18, 24)),
    "timm nfnet": _timm("test_nfnet", 64),
    "timm byobnet": _timm("test_byobnet", 64, mixes=True),
    "timm mambaout": _timm("test_mambaout", 64),
    "torchvision resnet18": _torchvision("resnet18", 64, mixes=True),
    # One process whose weights are off by one unit in the last place differs by 1.6e-9: 52 BatchNorms over few samples.
    "torchvision mobilenet": _torchvision("mobilenet_v2", 64, mixes=True, dropout=0.0, tolerance=1e-8),
    "torchvision shufflenet": _torchvision("shufflenet_v2_x0_5", 64, mixes=True),
    "torchvision squeezenet": _torchvision("squeezenet1_1", 64, draws=True),
    "deepfm": _deepctr("DeepFM"),
    "wide and deep": _deepctr("WDL"),
    "dcn": _deepctr("DCN"),
    "autoint": _deepctr("AutoInt"),
}  # fmt: skip


def available() -> dict[str, Case]:
    """The cases whose packages are installed."""
    has = {
        package: importlib.util.find_spec(package) is not None
        for package in {c.package for c in CASES.values()}
    }
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()
    return {name: case for name, case in CASES.items() if has[case.package]}
