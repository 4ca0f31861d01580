"""What is said between producers, broker and workers. Imports neither redis nor torch."""

from protocol.errors import (
    BadUrl,
    BrokerUnreachable,
    ClientClosed,
    ErrorCode,
    JobConflict,
    JobFailed,
    JobNotFound,
    MillstreamError,
    ModelMismatch,
    ModelUnavailable,
    OptionRefused,
    QueueFull,
    RequestError,
    WrongState,
)
from protocol.event import (
    Event,
    FinishReason,
    TerminalEvent,
    TerminalType,
    TokenEvent,
    decode_event,
    encode_terminal,
    encode_token,
    is_token,
)
from protocol.fingerprint import Fingerprint
from protocol.job import PRIORITIES, Job, Priority
from protocol.logprobs import TokenLogprob, TopLogprob
from protocol.message import Message, TextPart
from protocol.response_format import ResponseFormat
from protocol.result import (
    TERMINAL_STATES,
    Choice,
    JobError,
    Result,
    State,
    StoredChoice,
    StoredResult,
    TerminalState,
    Usage,
)
from protocol.sampling import SamplingParams
from protocol.validation import describe_validation

__all__ = [
    "PRIORITIES",
    "TERMINAL_STATES",
    "BadUrl",
    "BrokerUnreachable",
    "Choice",
    "ClientClosed",
    "ErrorCode",
    "Event",
    "Fingerprint",
    "FinishReason",
    "Job",
    "JobConflict",
    "JobError",
    "JobFailed",
    "JobNotFound",
    "Message",
    "MillstreamError",
    "ModelMismatch",
    "ModelUnavailable",
    "OptionRefused",
    "Priority",
    "QueueFull",
    "RequestError",
    "ResponseFormat",
    "Result",
    "SamplingParams",
    "State",
    "StoredChoice",
    "StoredResult",
    "TerminalEvent",
    "TerminalState",
    "TerminalType",
    "TextPart",
    "TokenEvent",
    "TokenLogprob",
    "TopLogprob",
    "Usage",
    "WrongState",
    "decode_event",
    "describe_validation",
    "encode_terminal",
    "encode_token",
    "is_token",
]
