"""transformers' Trainer: torchrun --nproc-per-node 2 hf_trainer_before.py"""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
ids = torch.randint(0, 100, (512, 8))
rows = [{"input_ids": row, "labels": (row[0] > 50).long()} for row in ids]
config = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
)
model = BertForSequenceClassification(config)

arguments = TrainingArguments(
    "out", per_device_train_batch_size=16, num_train_epochs=5, learning_rate=5e-3, use_cpu=True, report_to=[]
)
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train()
trainer.save_model("out/model")
