"""What exists for another package: a folder for each. The core neither imports nor names them.

hooks/        what each adds to the core (plugins.py), in files that entry points of pyproject.toml
              name; they import what they stand for only when it is used
transformers/ from_pretrained, save_pretrained, experts_implementation="fusion_moe", Trainer
peft/         LoRA of PEFT on encoded weights
vllm/, sglang/, serving.py
              plug-ins of serving engines, and what they share
thunder/      an executor for thunder.jit, and our operations in its nvFuser executor
nvfuser/      a backend for the targets sm_90 and sm_100
compat.py     our operations by the names that code for thunder and nvFuser calls
distributed/  torch.distributed: experts divided between ranks
routing/      record_routing, replay_routing: between what serves a model and what trains it

`fusion_moe.NAME` is short for `fusion_moe.integrations.NAME`, and the same module: documentation
writes the short name.
"""
