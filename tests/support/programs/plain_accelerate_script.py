"""A training script that knows nothing of hf_compressopt: Accelerate, AdamW, a linear schedule."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from transformers import get_linear_schedule_with_warmup

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(10, 133), nn.ReLU(), nn.Linear(133, 7))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
steps = int(sys.argv[1])
scheduler = get_linear_schedule_with_warmup(optimizer, 1, steps * accelerator.num_processes)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
for step in range(steps):
    generator = torch.Generator().manual_seed(1000 * accelerator.process_index + step)
    loss = nn.functional.mse_loss(model(torch.randn(16, 10, generator=generator)), torch.zeros(16, 7))
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
flat = torch.cat([p.detach().flatten() for p in model.parameters()])
alike = bool((accelerator.gather(flat).view(accelerator.num_processes, -1) == flat).all())
inner = optimizer.optimizer
metrics = inner.metrics() if hasattr(inner, "metrics") else {}
print(f"rank {accelerator.process_index}: {type(inner).__name__}, alike {alike}, stage {metrics.get('stage')}")
