"""Merges: one checkpoint out of several, in one streaming pass over all of them.

join         several opened checkpoints as one, each with its place in front of the key paths
recipes      how the elements of a merged tensor are computed from those of the sources
view         a joined checkpoint as the checkpoint that it becomes, for the plan and the mover of `wherry.converter`
linear       weighted sums of checkpoints of one tree
adapter      a base and a PEFT LoRA adapter
parts        the tensors of an adapter, sorted by what they are
base         the weights of a base by the names of an adapter
orientation  on which side of a stored matrix its inputs are
ties         what becomes of an output layer that is tied to the embedding
merge        the verb
"""
