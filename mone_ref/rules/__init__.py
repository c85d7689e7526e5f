"""One function per rule between a config and the tensors of a checkpoint; see ``validate``."""
