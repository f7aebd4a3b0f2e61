"""Modules of other projects as modules that `xl_export.trace` exports."""

from xl_export.adapters.from_forward import from_forward
from xl_export.adapters.from_transformers import from_transformers
from xl_export.adapters.ppo_trxl import from_ppo_trxl
from xl_export.adapters.recurrent_memory import from_recurrent_memory
from xl_export.adapters.rllib import from_rllib
from xl_export.adapters.rwkv import from_rwkv
from xl_export.adapters.torchrl import from_torchrl
from xl_export.adapters.x_transformers import from_x_transformers

__all__ = [
    "from_forward",
    "from_ppo_trxl",
    "from_recurrent_memory",
    "from_rllib",
    "from_rwkv",
    "from_torchrl",
    "from_transformers",
    "from_x_transformers",
]
