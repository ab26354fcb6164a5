"""The time limits of constraints in a worker, in seconds of the worker's clock."""

# For one mask, and for the tokens that the row takes before it.
MASK_SECONDS = 0.25
# For a constraint: compiling it, and its first mask.
PREPARE_SECONDS = 2.0
# The same for one that was within the limit before, in a process that has nothing else to do.
DEFINE_SECONDS = 4.0
# For the start of a mask server: imports, and the tokenizer of the largest vocabularies.
START_SECONDS = 60.0
