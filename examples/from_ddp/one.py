"""One device: `python one.py`."""

import torch
from model import LanguageModel, batches

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = LanguageModel().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, words in enumerate(batches(num_steps=10)):
    optimizer.zero_grad()
    loss = model(words.to(device))
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
