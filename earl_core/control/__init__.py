"""The controller's side of a run: worker groups, the learner's life, failure diagnosis."""
