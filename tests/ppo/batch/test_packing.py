"""Budgets of a run's passes, as the configuration says them and as guards have halved them."""

import torch
from torch import nn
from transformers import LlamaConfig

from ppo.batch.packing import make_batchers
from ppo.config import load_config
from ppo.models.learner import Learner, make_optimizer
from ppo.models.roles import Models
from sharding.mesh import build_mesh, init_distributed

CPU = torch.device("cpu")


def test_where_a_micro_batch_is_of_all_sequences_a_halving_leaves_half_of_them():
    module, counts = nn.Linear(1, 1), {}
    module.config = LlamaConfig()  # pyright: ignore[reportArgumentType]
    with init_distributed(CPU):
        for size in ("null", "2"):
            keys = ["actor.use_dynamic_bsz=false", f"actor.ppo_micro_batch_size_per_gpu={size}"]
            keys += ["actor.ppo_mini_batch_size=4", "rollout.n=3", "model.use_remove_padding=false"]
            config = load_config("ppo_tiny.yaml", keys)
            mesh, optim = build_mesh(config.dims(1, 1), CPU), config.actor.optim
            actor = Learner(
                name="actor",
                module=module,
                device=CPU,
                optimizer=make_optimizer(module, optim, CPU),
                optim=optim,
                grad_clip=1.0,
                total_steps=1,
            )
            models = Models(actor, None, None)
            counts[size] = [
                make_batchers(config, mesh, models, halvings={"actor": times}).actor.budget.count
                for times in range(5)
            ]
    assert counts == {"null": [None, 6, 3, 1, 1], "2": [2, 1, 1, 1, 1]}
