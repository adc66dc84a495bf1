"""Policy weights on their way from the learner to the engines, through shared memory."""
