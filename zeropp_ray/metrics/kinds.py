"""The kinds of tensor memory that a member has: the same names in the plan, in what is measured, and in the record."""

WEIGHTS = "weights and moments"  # this member's shards and the optimizer's state
GRADIENT_SHARDS = "gradient shards"  # reduced gradients, and what is exchanged to reduce them further
RESIDENT = "resident parameters"  # of the chunks that are gathered
GRADIENT_BUFFERS = "gradient buffers"  # unsharded: open, in flight with what arrives of others, and the side buffer
ACTIVATIONS = "activations"  # what autograd keeps from a forward to its B; of a recomputed chunk from its RF
CHUNK_INPUTS = "chunk inputs"  # of recomputed chunks, from F to RF
WEIGHT_INPUTS = "weight inputs"  # what B leaves for W: inputs and output gradients of deferred layers
MESSAGES = "messages"  # receives posted ahead, arrived and not yet used, sends that are not drained
COPIES = "copies of the state"  # in host memory: two of this member's, two of the one whose buddy it is
REST = "rest"  # what a task makes and drops, and the model's own buffers

KINDS = (
    WEIGHTS,
    GRADIENT_SHARDS,
    RESIDENT,
    GRADIENT_BUFFERS,
    ACTIVATIONS,
    CHUNK_INPUTS,
    WEIGHT_INPUTS,
    MESSAGES,
    COPIES,
    REST,
)
