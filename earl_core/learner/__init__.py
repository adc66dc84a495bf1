"""The learner: packs samples, scores them and updates the policy.

`packing` arranges samples into microbatches, `attention` and `model` run any causal language
model over a pack, `policy_learner` owns model and optimizer, `checkpoint` stores them.
"""
