"""shoal's Trainer: shoal run -n 2 hf_trainer_after.py"""

import torch
from transformers import BertConfig, BertForSequenceClassification

import shoal

torch.manual_seed(0)
ids = torch.randint(0, 100, (512, 8))
rows = {"input_ids": ids, "labels": (ids[:, 0] > 50).long()}
config = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
)
model = BertForSequenceClassification(config)

trainer = shoal.Trainer(
    model, loss="model", optimizer=lambda params: torch.optim.AdamW(params, lr=5e-3), metrics=["accuracy"]
)
data = shoal.Dataset.from_arrays(rows)
trainer.fit(data.shuffle(seed=0).batch(32), epochs=5)  # 32 over all workers
measured = trainer.evaluate(data.batch(256))
trainer.save("out/model")
if shoal.rank() == 0:
    print(f"accuracy {measured['accuracy']:.3f}")
