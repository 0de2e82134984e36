"""Lightning: python lightning_before.py"""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(4096, 20)
y = (x.sum(1) > 0).long()


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        accuracy = (self.model(inputs).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    train = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)  # for each of two devices
    validation = DataLoader(TensorDataset(x, y), batch_size=512)
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_progress_bar=False
    )
    trainer.fit(Classifier(), train, validation)
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")
