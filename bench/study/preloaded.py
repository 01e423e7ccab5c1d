"""Imports of the study's processes, made once by the server that they are forked from; see `pool`.

No name is used here: importing the modules is the purpose.
"""

import datasets  # noqa: F401
import torch.optim.lr_scheduler  # noqa: F401
import transformers.generation.utils
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: F401

import sparse_opt.analysis
import sparse_opt.mask_finding.find
import sparse_opt.masks.mask_set
import sparse_opt.trainers.dpo
import sparse_opt.trainers.grpo
import sparse_opt.trainers.rft.train
import sparse_opt.trainers.sft  # noqa: F401

from . import main, pool, runs, tasks  # noqa: F401
