"""Two processes under DistributedDataParallel, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

RUN = """
import sys

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from sparse_opt.errors import ConfigError
from sparse_opt.integrations import SparseArguments, sparse_trainer

torch.set_num_threads(1)
folder, mask, out, rows = sys.argv[1:]
args = DPOConfig(
    output_dir=out, max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=2, learning_rate=3e-3,
    max_grad_norm=0.5, weight_decay=0.1, bf16=False, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    train_sampling_strategy="sequential", ddp_backend="gloo",
)


def build(grads):
    return sparse_trainer(DPOTrainer)(
        LlamaForCausalLM.from_pretrained(folder), args=args, train_dataset=Dataset.load_from_disk(rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder), mask=mask,
        sparse=SparseArguments(grads=grads),
    )


try:
    build("compact")
except ConfigError as error:
    print("refused:", error)
trainer = build("dense")
trainer.train()
save_file({n: p.detach() for n, p in trainer.model.named_parameters()}, f"{out}/rank{args.process_index}.safetensors")
"""


@pytest.mark.slow
def test_dense_gradients_under_ddp_train_as_one_process_with_the_whole_batch(lab, tmp_path):
    if lab.device.type != "cpu":
        pytest.skip("the two processes run on the CPU")
    mask = lab.random_mask(0.1)
    mask_file = mask.save(tmp_path / "mask.safetensors")
    rows = lab.rows("DPO").select([0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2])  # three steps of four
    rows.save_to_disk(tmp_path / "rows")
    (tmp_path / "run.py").write_text(RUN)

    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", tmp_path / "run.py"]
    files = [lab.folder, mask_file, tmp_path / "out", tmp_path / "rows"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([*launch, *files], capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("refused: MULTI_CPU: DistributedDataParallel averages dense gradients") == 2

    alone = lab(
        "DPO",
        mask=mask,
        max_steps=3,
        warmup_steps=0,
        lr_scheduler_type="linear",
        train_sampling_strategy="sequential",
        given={"train_dataset": rows},
    )
    alone.train()
    ranks = [load_file(tmp_path / "out" / f"rank{rank}.safetensors") for rank in (0, 1)]
    start = lab.model()
    moved = 0.0
    for name, p in alone.model.named_parameters():
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        # Three steps of up to 3e-3, of gradients that were summed in another order.
        torch.testing.assert_close(ranks[0][name], p.detach(), rtol=0, atol=1e-5, msg=name)
        moved = max(moved, (p - start.get_parameter(name)).abs().max().item())
    assert moved > 3e-3
