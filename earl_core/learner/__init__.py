"""The learner: packs samples, scores them and updates the policy.

`packing` arranges samples into microbatches, `attention` and `model` run any causal language
model over a pack, `mesh` and `parallel_model` lay it out over ranks, `policy_learner` owns model
and optimizer, `checkpoint` stores them.
"""
