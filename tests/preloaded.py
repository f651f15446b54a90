"""What most ranks of the tests need: imported once by the server that they are forked from
(distributed.py), for imports are half of what a rank of a short run costs."""

import gc
from importlib import import_module

for _name in (
    *("torch.distributed.fsdp", "torch.utils.tensorboard"),
    *("transformers.models.qwen2.modeling_qwen2", "transformers.models.llama.modeling_llama"),
    *("train_ppo", "ppo.engines.embedded.engine"),
):
    import_module(_name)

gc.collect()
gc.freeze()  # else a rank's first collection writes to, and so copies, the pages of all that
