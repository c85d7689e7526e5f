"""A whole model over several ranks: simulated in one process, or one rank a process.

Tensor parallelism cuts heads, intermediate columns and the vocabulary; pipeline parallelism
gives every stage some of the layers. Both modes run the same code over the oracle's own steps:
a process *holds* some of the ranks of a stage, all of them in a simulation (``model.py``), one
under ``torch.distributed`` (``distributed.py``).
"""
