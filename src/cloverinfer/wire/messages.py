"""Messages of the control plane: at most one of each per node and step.

Requests travel as small numbers. A *lane* is the place of one wavefront on one node; a node runs
the steps of a lane one by one, in order, and may have been sent the next one already. Whatever
arrives for an incarnation that has ended is dropped.
"""

from __future__ import annotations

from typing import Union

import msgspec

from ..core.logprobs import TokenLogprobs
from ..core.sampling import fits_tail
from ..kvcache.layout import PoolLayout
from ..transport.base import RegionRef


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What a request's text must look like."""

    kind: str
    """json (a schema), regex, choice (a JSON list of texts) or grammar."""
    text: str


class Shaping(msgspec.Struct, frozen=True, array_like=True):
    """What changes a row's logits, for requests that ask for it; names as in ``SamplingParams``."""

    num_prompt: int
    """The request's tokens before this position are its prompt, those after it generated."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    bad_words: list[list[int]] = []
    """As tokens."""
    min_tokens: int = 0
    stops: list[int] = []
    """Tokens that may not be chosen before ``min_tokens``."""
    grammar: Grammar | None = None

    @property
    def needs_host(self) -> bool:
        """Its mask is the host's to make, once the last token is known."""
        return self.grammar is not None or not fits_tail(self.bad_words)

    @property
    def penalises(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """What a node needs to choose a token."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    logprobs: int | None = None
    """Likeliest tokens to report with each token; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for each token that the join carries but the first; for prefill."""
    min_p: float = 0.0
    shaping: Shaping | None = None


class Push(msgspec.Struct, array_like=True):
    """Where a prefill puts a request's KV cache."""

    node: str
    """Name of the node whose pool receives it."""
    transfer: int
    """Slot of the transfer at the receiver."""
    blocks: list[int]
    """Receiver's blocks, one for each of its block size in the request."""
    skip: int
    """Leading blocks that the receiver already holds, which are not sent."""
    start: int
    """Tokens in those blocks."""


class Join(msgspec.Struct, array_like=True):
    """A request becomes known to a node."""

    request: int
    incarnation: int
    tokens: list[int]
    """Token ids from position ``start`` on that are known so far."""
    start: int
    """Position of ``tokens[0]``: the KV cache of what lies before it exists."""
    blocks: list[int]
    """The request's blocks in this node's pool; empty on a dense node of pda."""
    sampling: Sampling
    home: str = ""
    """Name of the attention node that holds its KV cache (pda dense nodes)."""
    push: Push | None = None
    """Set on prefill nodes."""
    before: list[int] = []
    """Token ids before position ``start``, where shaping the logits needs them."""


class StepPlan(msgspec.Struct, array_like=True, tag="step"):
    """One forward of one lane of a prefill, dense or colocated node.

    Row i advances request ``rows[i]`` by ``counts[i]`` tokens from position ``starts[i]``. Where
    the node does not know a token from the join, it is the one that it sampled there last. Rows
    with ``samples[i]`` sample a token after their last position. Rows of one home are adjacent.
    """

    lane: int
    step: int
    rows: list[int]
    starts: list[int]
    counts: list[int]
    samples: list[bool]
    joins: list[Join]
    leaves: list[int]
    """Requests to forget, before the joins are read."""
    blocks: list[tuple[int, list[int]]]
    """Blocks added to a request's table: (request, blocks)."""


class AttentionJoin(msgspec.Struct, array_like=True):
    """A request's block table becomes known to an attention node."""

    request: int
    blocks: list[int]


class AttentionPlan(msgspec.Struct, array_like=True, tag="attention"):
    """The rows of one dense node's wavefront that live on this attention node, in hop order."""

    source: str
    """Name of the dense node."""
    lane: int
    step: int
    rows: list[int]
    lengths: list[int]
    """Tokens in the cache once this step's token is appended."""
    joins: list[AttentionJoin]
    leaves: list[int]
    blocks: list[tuple[int, list[int]]]


class ExpectTransfer(msgspec.Struct, array_like=True, tag="expect"):
    """Promise to a receiver: these blocks of a request will be put into its pool."""

    transfer: int
    request: int
    incarnation: int
    source: str
    """Name of the prefill node."""
    blocks: list[int]
    """The receiver's blocks that will be written, each once per layer."""
    start: int
    """Position of the first token in them."""
    count: int
    """Tokens that will be written; the last block may stay partly empty."""
    others: list[str] = []
    """Further senders, where each has some of the KV heads."""


class CancelTransfer(msgspec.Struct, array_like=True, tag="cancel"):
    """The transfer will not be finished; the receiver forgets it."""

    transfer: int


class KVChunk(msgspec.Struct, array_like=True, tag="chunk"):
    """From prefill node to receiver, before the chunk's puts: what the next notices stand for."""

    transfer: int
    request: int
    incarnation: int
    number: int
    """Counts the chunks of a transfer from 0 on."""
    first: int
    """Index of the chunk's first block among the promised blocks."""
    count: int
    """Blocks of the chunk, in each layer."""


class KVSum(msgspec.Struct, array_like=True, tag="sum"):
    """From prefill node to receiver, before the put of one layer of a chunk: its checksum."""

    transfer: int
    request: int
    incarnation: int
    number: int
    """Of the chunk."""
    layer: int
    crc: int
    """CRC-32C of the blocks' own checksums, in the order of the chunk."""


class StagingGrant(msgspec.Struct, array_like=True, tag="grant"):
    """From receiver to a prefill node whose blocks must be converted: the ring to put them in."""

    region: RegionRef
    slots: int
    """Slot i is ``slot_bytes`` bytes from ``i * slot_bytes``; each takes one block of one layer."""
    slot_bytes: int


class KVPiece(msgspec.Struct, array_like=True, tag="piece"):
    """From prefill node to receiver, before the put of blocks of one layer into the ring. The
    notice that proves it names the piece by its number."""

    transfer: int
    request: int
    incarnation: int
    number: int
    """Counts the pieces of one layer of a transfer from 0 on."""
    layer: int
    first: int
    """Position of the first token that the receiver is to take."""
    count: int
    """Tokens that it is to take."""
    skip: int
    """Tokens before them in the first block."""
    slots: list[int]
    """Of the ring, one for each block."""
    crc: int | None = None
    """As in ``KVSum``; None with checksums off."""


class KVCredit(msgspec.Struct, array_like=True, tag="credit"):
    """From receiver to prefill node: these slots of the ring may be used again."""

    slots: list[int]


class KVReset(msgspec.Struct, array_like=True, tag="reset"):
    """From prefill node to receiver, once puts to it have failed and ended: what was announced and
    not proven will not come, and its slots can be given back."""


class TransferDone(msgspec.Struct, array_like=True, tag="transferred"):
    """From receiver to scheduler: every promised block of every layer has arrived once; or not."""

    node: str
    transfer: int
    request: int
    incarnation: int
    nbytes: int
    error: str = ""
    """Why the transfer cannot be completed; empty when it is whole."""
    by_source: dict[str, int] = {}
    """Bytes that each prefill node sent; several share a token's heads evenly."""


class StepStats(msgspec.Struct, array_like=True):
    """Measured on the node that ran the step; seconds."""

    seconds: float = 0.0
    """From reading the plan to the result."""
    dense: float = 0.0
    """In stages, logits."""
    sample: float = 0.0
    attention: float = 0.0
    """In the local attention backend (0 where attention is remote)."""
    attention_calls: int = 0
    """Layer calls to local attention, or hops to attention nodes."""
    barrier: float = 0.0
    """Sending hops to attention nodes and waiting for them."""
    barriers: int = 0
    """Times it waited for them."""
    push: float = 0.0
    """Putting KV blocks into receivers' pools, while layers are computed or after."""
    push_wait: float = 0.0
    """From the end of computing to the end of the last put: what was not hidden."""
    bytes_in: int = 0
    bytes_out: int = 0
    native_layers: int = 0
    """Layers that ran without Python."""


class AttentionDone(msgspec.Struct, array_like=True, tag="attended"):
    """What an attention node did for one step of one wavefront."""

    node: str
    source: str
    lane: int
    step: int
    calls: int
    """Layer calls."""
    rows: int
    seconds: float
    """In append and attend."""
    bytes_in: int
    bytes_out: int
    native_calls: int = 0
    """Of ``calls``, those that were answered without Python."""


class StepDone(msgspec.Struct, array_like=True, tag="done"):
    """A step's sampled tokens: ``tokens[i]`` for the i-th row of the plan that samples."""

    node: str
    lane: int
    step: int
    tokens: list[int]
    stats: StepStats
    logprobs: dict[int, TokenLogprobs] = {}
    """Of the rows that asked for them, by index in ``tokens``."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """Of the tokens after each of the row's in this step, the last of the prompt apart; by index
    in the plan's rows."""
    errors: dict[int, str] = {}
    """Why no token could be chosen for a row, by index in ``tokens``, where it stands for none."""
    blamed: dict[int, str] = {}
    """Of those errors that a request's own parameter is to blame for: its name, by the same index.
    """
    attended: list[AttentionDone] = []
    """What attention nodes did for the step without their Python: they do not report it."""


class StepFailed(msgspec.Struct, array_like=True, tag="failed"):
    """A step raised; none of its rows advanced, and nobody works on it any more."""

    node: str
    lane: int
    step: int
    error: str
    gone: list[str] = []
    """Nodes that could not be reached, where that is why: rows of other homes are not to blame."""
    cut: list[str] = []
    """Receivers where bytes of this step's puts may still arrive: some of them failed, and the way
    there could not be made anew, which would have fenced them."""


class CompileGrammar(msgspec.Struct, array_like=True, tag="compile"):
    """From scheduler to nodes that sample: a request with this grammar will come."""

    key: int
    grammar: Grammar


class GrammarCompiled(msgspec.Struct, array_like=True, tag="compiled"):
    """A node's answer: a join with the grammar costs nothing now, or why it cannot be."""

    node: str
    key: int
    error: str = ""


class HopFailed(msgspec.Struct, array_like=True, tag="hop failed"):
    """From attention node to dense node, instead of a notice: the step cannot be attended."""

    lane: int
    step: int
    error: str


class NodeGone(msgspec.Struct, array_like=True, tag="gone"):
    """From scheduler to nodes that work with a node which has died: nothing of it will come, and
    what has come is void."""

    name: str


class Fence(msgspec.Struct, array_like=True, tag="fence"):
    """From scheduler to a receiver: blocks wait until nothing that the writer has put before is
    written there any more."""

    writer: str
    """Name of a prefill node that is gone, or whose puts there have failed and ended."""
    number: int
    """Stands for the blocks."""


class Fenced(msgspec.Struct, array_like=True, tag="fenced"):
    """A receiver's answer to ``Fence``: the blocks may be used again."""

    node: str
    number: int


class Probe(msgspec.Struct, array_like=True, tag="probe"):
    """From scheduler to a node that something waits for too long: does it stand still?"""

    number: int
    """For the answer to repeat."""


class Alive(msgspec.Struct, array_like=True, tag="alive"):
    """A node's answer to ``Probe``, from its loop."""

    node: str
    number: int


class PeerInfo(msgspec.Struct, frozen=True, array_like=True):
    """What one node must know of another to exchange data with it."""

    name: str
    role: str
    address: str
    regions: dict[str, RegionRef]
    """By purpose: ``kv`` (the pool), ``hop`` (rows from or to dense nodes)."""
    layout: PoolLayout | None
    """Of the pool, where it has one."""
    layout_name: str
    """Of the pool's blocks; peers put into those of the canonical layout alone."""
    model: str
    """Fingerprint of the model: nodes of different models refuse each other."""
    version: str
    """Version of the wire protocol."""
    dtype: str
    """Type it computes in."""
    first_head: int = 0
    """Which of the model's KV heads the first one in its pool is."""


class NodeInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a started node tells whoever started it."""

    peer: PeerInfo
    pid: int
    host: str
    device: str
    transport: str
    threads: int
    kv_blocks: int
    """Blocks of its pool; 0 without one."""
    eos_token_ids: list[int]
    max_position: int
    vocab_size: int
    weight_bytes: int
    """Weights that a decode step reads; 0 without any."""


class Meet(msgspec.Struct, array_like=True, tag="meet"):
    """To every node, once all have started: the others, and where results go."""

    scheduler: str
    """Address of the scheduler's endpoint."""
    peers: list[PeerInfo]


class Met(msgspec.Struct, array_like=True, tag="met"):
    """A node's answer: it is connected to all it needs, or why not."""

    node: str
    error: str = ""


class Shutdown(msgspec.Struct, array_like=True, tag="shutdown"):
    """The node ends its loop, closes its endpoint and gives everything back."""


Message = Union[
    StepPlan,
    AttentionPlan,
    ExpectTransfer,
    CancelTransfer,
    KVChunk,
    KVSum,
    StagingGrant,
    KVPiece,
    KVCredit,
    KVReset,
    TransferDone,
    StepDone,
    StepFailed,
    CompileGrammar,
    GrammarCompiled,
    AttentionDone,
    HopFailed,
    NodeGone,
    Fence,
    Fenced,
    Probe,
    Alive,
    Meet,
    Met,
    Shutdown,
]

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Raises ``msgspec.ValidationError`` or ``msgspec.DecodeError`` on anything else."""
    return _decoder.decode(data)
