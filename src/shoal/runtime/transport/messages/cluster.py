"""Every sentence one process says to another, one class each.

A docstring says who speaks, what answers, and whether saying it twice is
safe. Nothing here decides or moves bytes: `codec.py` turns a message into
bytes and back, and refuses what is not one of `MESSAGES`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shoal.runtime.transport.messages.blocks import BLOCK_MESSAGES
from shoal.runtime.transport.messages.host_shared import SHARING_MESSAGES
from shoal.runtime.transport.messages.lateness import LATENESS_MESSAGES
from shoal.runtime.transport.messages.ledger import LEDGER_MESSAGES
from shoal.runtime.transport.messages.message import Count, Seconds
from shoal.runtime.transport.messages.message import Message as Message
from shoal.runtime.transport.messages.ps import PS_MESSAGES
from shoal.runtime.transport.messages.server_group import GROUP_MESSAGES

# ---- joining -------------------------------------------------------------------------------------


class Join(Message, frozen=True, tag="join"):
    """Worker to coordinator: "I am this rank", the first sentence of every connection.

    Answered by Joined or JoinRefused, or by Leave where a replacement comes
    after all ranks have ended their scripts. Repeating it is safe: a process
    may hold several connections. A newer incarnation closes the connections
    of the older.
    """

    rank: Count
    incarnation: Count
    pid: Count
    num_workers: Count


class Joined(Message, frozen=True, tag="joined"):
    """Coordinator to worker: "you are in", and the view there is; 0 before the first was formed."""

    view: Count


class JoinRefused(Message, frozen=True, tag="join-refused"):
    """Coordinator to worker: "you are not one of us"; the connection ends with it."""

    reason: str


# ---- calls ---------------------------------------------------------------------------------------


class BeginCall(Message, frozen=True, tag="begin-call"):
    """Worker to coordinator: "my script calls into shoal"; `number` counts the calls from 1.

    Answered when all ranks have begun the call, by CallGranted; by Regroup
    where somebody waits to enter a view, by CallRefused where ranks differ, by
    WaitExpired where some never come. Repeating it is safe: a call already
    granted is granted again.
    """

    rank: Count
    number: Count
    kind: str  # fit, evaluate, predict, save, ...
    detail: str  # what else must be the same on all ranks


class CallGranted(Message, frozen=True, tag="call-granted"):
    """Coordinator to worker: "all ranks make this call; go on"."""

    number: Count


class CallRefused(Message, frozen=True, tag="call-refused"):
    """Coordinator to worker: "the ranks differ", with what each known rank did instead."""

    number: Count
    calls: dict[int, str]


class ScriptEnded(Message, frozen=True, tag="script-ended"):
    """Worker to coordinator: "my script is at its end, after so many calls".

    Answered by Leave once all ranks are, by Regroup where somebody waits to
    enter a view, by CallRefused where another rank calls on, by WaitExpired
    where some never come. Repeating it is safe.
    """

    rank: Count
    num_calls: Count


class Leave(Message, frozen=True, tag="leave"):
    """Coordinator to worker: "all ranks reached the end of the script; you may exit"."""


class WaitExpired(Message, frozen=True, tag="wait-expired"):
    """Coordinator to worker, instead of any answer that waits: "your wait is over", and for whom it was."""

    operation: str
    waited_s: float
    missing: list[str]  # "rank 2 (never joined)"; for the store, the keys nobody set


# ---- views ---------------------------------------------------------------------------------------


class EnterView(Message, frozen=True, tag="enter-view"):
    """Worker to coordinator: "I have left this view, after so many exchanges, and wait for the next".

    Answered by ViewFormed when every rank has come in its newest incarnation,
    by ViewRefused where that cannot be, by WaitExpired where some never come
    and nobody may be replaced. Repeating it is safe: whoever is in the view
    already is told of it again.
    """

    rank: Count
    incarnation: Count
    view_left: Count  # 0: never was in one
    finished: Annotated[int, msgspec.Meta(ge=-1)]  # exchanges finished; -1: none, and no state either
    call: Count  # the newest call this rank has begun; 0: none
    waited_s: Seconds = (
        0.0  # for the others, in the exchange that broke: their patience with it is used up by so much
    )
    waited_in: str = ""  # what that exchange was, in words: "forward and backward of step 5"


class ViewFormed(Message, frozen=True, tag="view-formed"):
    """Coordinator to worker and to supervisor: "this is the view now, and this is who has the newest state"."""

    view: Count
    donor: Annotated[int, msgspec.Meta(ge=-1)]  # -1: nobody has state
    finished: Annotated[int, msgspec.Meta(ge=-1)]  # exchanges the donor has finished; -1 without one
    call: Count  # the newest call the donor has begun
    incarnations: list[Count]  # by rank


class ViewRefused(Message, frozen=True, tag="view-refused"):
    """Coordinator to worker: "you cannot be in the next view", and why: replaced, or ranks too far apart."""

    reason: str


class Regroup(Message, frozen=True, tag="regroup"):
    """Coordinator to worker, instead of an answer to BeginCall or ScriptEnded: "somebody waits to enter a view".

    The worker leaves `view`, enters the next one, and asks again.
    """

    view: Count


# ---- the supervisor's line to the coordinator ------------------------------------------------------


class Watch(Message, frozen=True, tag="watch"):
    """Supervisor to coordinator: "tell me what I must know", the first sentence of its connection.

    Answered by Watching; then Suspect and ViewFormed come as they happen.
    Repeating it is safe, and how the supervisor sees that somebody answers.
    """


class Watching(Message, frozen=True, tag="watching"):
    """Coordinator to supervisor: "I am at work", the view there is, and how many notes for the ledger are written down."""

    view: Count
    num_noted: Count = 0


class Suspect(Message, frozen=True, tag="suspect"):
    """Coordinator to supervisor: "this process keeps the others waiting; it must be killed".

    Said again as long as they wait, and to whoever watches anew.
    """

    rank: Count
    incarnation: Count
    why: str
    waited_s: float
    lenient: bool  # it may well be at work (only a replacement waits, or it is one): kill it only if it was stopped


class Reaped(Message, frozen=True, tag="reaped"):
    """Supervisor to coordinator: "this process is dead". Never answered; repeating it is safe."""

    rank: Count
    incarnation: Count
    code: int  # minus the signal that killed it


# ---- store ---------------------------------------------------------------------------------------


class StoreSet(Message, frozen=True, tag="store-set"):
    """Worker to coordinator: "keep these values", all at once. Answered by StoreDone. Repeating it is safe."""

    values: dict[str, bytes]


class StoreGet(Message, frozen=True, tag="store-get"):
    """Worker to coordinator: "tell me these values, once all are there".

    Answered by StoreValues, in the order of the keys, or by WaitExpired.
    Repeating it is safe.
    """

    keys: list[str]
    timeout_s: Seconds


class StoreWait(Message, frozen=True, tag="store-wait"):
    """Worker to coordinator: "tell me when all these keys are there".

    Answered by StoreDone or by WaitExpired. Repeating it is safe.
    """

    keys: list[str]
    timeout_s: Seconds


class StoreAdd(Message, frozen=True, tag="store-add"):
    """Worker to coordinator: "add to this decimal counter". Answered by StoreCount.

    Repeating it is safe with a `client` and its `serial`: the newest answer
    of every client is kept, and given again. Without (0) it counts twice.
    """

    key: str
    amount: int
    client: Count = 0
    serial: Count = 0


class StoreAppend(Message, frozen=True, tag="store-append"):
    """Worker to coordinator: "add these bytes to the end". Answered by StoreDone. Repeating it: as with StoreAdd."""

    key: str
    value: bytes
    client: Count = 0
    serial: Count = 0


class StoreCompareSet(Message, frozen=True, tag="store-compare-set"):
    """Worker to coordinator: "replace the value if it is `expected`; an empty `expected` also means absent".

    Answered by StoreValues with the one value there is now (or `expected`,
    where the key is absent and stays so: torch's rule). Repeating it: as with
    StoreAdd; without a `client`, safe as long as nobody sets the value back.
    """

    key: str
    expected: bytes
    desired: bytes
    client: Count = 0
    serial: Count = 0


class StoreCheck(Message, frozen=True, tag="store-check"):
    """Worker to coordinator: "are all these keys there?" Answered by StoreFlag at once. Repeating it is safe."""

    keys: list[str]


class StoreDelete(Message, frozen=True, tag="store-delete"):
    """Worker to coordinator: "forget this key". Answered by StoreFlag: was it there? Repeating it: as with StoreAdd."""

    key: str
    client: Count = 0
    serial: Count = 0


class StoreNumKeys(Message, frozen=True, tag="store-num-keys"):
    """Worker to coordinator: "how many keys are there?" Answered by StoreCount. Repeating it is safe."""


class StoreDone(Message, frozen=True, tag="store-done"):
    """Coordinator to worker: "done"."""


class StoreValues(Message, frozen=True, tag="store-values"):
    """Coordinator to worker: the values, in the order in which they were asked for."""

    values: list[bytes]


class StoreCount(Message, frozen=True, tag="store-count"):
    """Coordinator to worker: a number."""

    value: int


class StoreFlag(Message, frozen=True, tag="store-flag"):
    """Coordinator to worker: yes or no."""

    value: bool


class StoreRefused(Message, frozen=True, tag="store-refused"):
    """Coordinator to worker: "that cannot be done"; nothing was changed, and the connection goes on."""

    reason: str


# ---- status: worker to its supervisor, over the socket pair it was born with; never answered ------


class Progress(Message, frozen=True, tag="progress"):
    """Worker to supervisor: "this is where I am". Only the newest counts; any may be lost."""

    rank: Count
    call: Count
    phase: str
    epoch: Count
    num_epochs: Count | None
    step: Count
    num_steps: Count | None
    loss: float | None
    metrics: dict[str, float]
    samples: Count
    samples_per_s: float
    eta_s: float | None


class Failed(Message, frozen=True, tag="failed"):
    """Worker to supervisor: "I cannot go on, and this is why", before it exits with `exit_code`.

    `kind` says whose fault: the user's own exception, an error of shoal's, or
    an exchange that broke because another rank went first (reported last).
    """

    rank: Count
    kind: Literal["script", "shoal", "peer"]
    error: str  # class name
    message: str
    traceback: str
    exit_code: int
    facts: str = "{}"  # the error's attributes, as a JSON object: their shapes differ from error to error


class Live(Message, frozen=True, tag="live"):
    """Worker to supervisor: "I have caught up; what I say from now on is news". Repeating it is safe."""

    rank: Count


class Saved(Message, frozen=True, tag="saved"):
    """Worker to supervisor, and on to the coordinator: "the checkpoint of this step is whole, at this path".

    Repeating it is safe.
    """

    rank: Count
    path: str
    step: Count


class Happened(Message, frozen=True, tag="happened"):
    """Worker to supervisor: "write this down": a kind of event, and its facts as JSON."""

    rank: Count
    kind: str
    facts: str


class Finished(Message, frozen=True, tag="finished"):
    """Worker to supervisor: "my script is done", with the totals of the run. Said once, last."""

    rank: Count
    samples: Count
    seconds: float
    steps: Count
    metrics: dict[str, float]
    staleness: dict[int, Count] = msgspec.field(
        default_factory=dict
    )  # pulls by how far they ran ahead; relaxed
    num_late: Count = 0  # contributions that came too late to count
    num_missed: Count = 0  # steps that were over before this rank began them
    exchange_bytes: Count = 0  # memory reserved for what it exchanged with servers


MESSAGES: tuple[type[Message], ...] = (
    Join,
    Joined,
    JoinRefused,
    BeginCall,
    CallGranted,
    CallRefused,
    ScriptEnded,
    Leave,
    WaitExpired,
    EnterView,
    ViewFormed,
    ViewRefused,
    Regroup,
    Watch,
    Watching,
    Suspect,
    Reaped,
    StoreSet,
    StoreGet,
    StoreWait,
    StoreAdd,
    StoreAppend,
    StoreCompareSet,
    StoreCheck,
    StoreDelete,
    StoreNumKeys,
    StoreDone,
    StoreValues,
    StoreCount,
    StoreFlag,
    StoreRefused,
    Progress,
    Failed,
    Live,
    Saved,
    Happened,
    Finished,
    *GROUP_MESSAGES,
    *LEDGER_MESSAGES,
    *BLOCK_MESSAGES,
    *PS_MESSAGES,
    *SHARING_MESSAGES,
    *LATENESS_MESSAGES,
)
"""All a decoder accepts. A new message is one class above and one line here."""
