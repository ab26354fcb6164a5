"""The codec: what each kind of field becomes, in both directions, and what is refused.

Both when a codec is made and when it reads a message.
"""

from dataclasses import dataclass, fields, make_dataclass
from enum import Enum, StrEnum
from typing import Annotated, Any, TypeVar

import numpy as np
import pytest
from tandem.internal.v1 import frontend_pb2 as pb
from tandem.internal.v1 import record_pb2
from tandem.internal.v1 import worker_pb2 as wpb
from tandem.v1.inference_pb2 import WAIT_REASON_QUEUE
from typing_extensions import TypeAliasType

from tandem_contract.bounds import Cut, Length, Range, WireError
from tandem_contract.codec import Codec, OneOf, array, packed, parsed, unaliased


class Code(StrEnum):
    INVALID = "as this program calls it"
    QUEUE_FULL = "full"


class Reason(Enum):
    QUEUE = 1
    SLOW_STEP = 2


@dataclass(frozen=True)
class Plain:
    stream: int
    code: Code
    message: str = ""
    field: str = ""
    retry_seconds: float = 0.0
    tenant_is_full: bool = False


@dataclass(frozen=True)
class Wait:
    reason: Reason | None
    message: str
    streams: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Waits:
    waits: tuple[Wait, ...]


@dataclass(frozen=True)
class Weights:
    version: str
    folder: str


@dataclass(frozen=True)
class Load:
    weights: Weights
    roots: tuple[str, ...]
    keep_rows: bool = False


@dataclass(frozen=True)
class Mark:
    number: int
    epoch: float


class State(Enum):
    WAITING = 1
    RUNNING = 2


@dataclass(frozen=True)
class StateQuery:
    query: int
    states: frozenset[State]
    after: Mark | None = None


@dataclass(frozen=True)
class Drain:
    query: int
    worker: str
    max_seconds: float
    force: bool
    stop_replies: bool = False


@dataclass(frozen=True)
class Limits:
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    queue_share: float | None = None
    row_share: float | None = None


@dataclass(frozen=True, eq=False)
class Arrays:
    streams: "np.ndarray[Any, np.dtype[np.uint64]]"
    offsets: "np.ndarray[Any, np.dtype[np.int32]]"
    tokens: tuple[int, ...]


ARRAYS: Codec[Any, Arrays] = Codec(pb.StepOutput, Arrays, other=("ends", "logprobs", "prompt_logprobs"))
PLAIN = Codec(pb.Rejected, Plain)
LOAD = Codec(wpb.LoadWeights, Load)
QUERY = Codec(pb.RequestsQuery, StateQuery, other=("page_size", "id_prefix", "tenant", "all_tenants"))


@pytest.mark.parametrize(
    ("codec", "value", "message"),
    [
        (
            PLAIN,
            Plain(7, Code.QUEUE_FULL, "full", "f", 1.5, True),
            pb.Rejected(
                stream=7, code=pb.REJECT_CODE_QUEUE_FULL, message="full", field="f", retry_seconds=1.5,
                tenant_is_full=True,
            ),
        ),
        (
            Codec(pb.Waits, Waits),
            Waits((Wait(Reason.QUEUE, "m", (1, 2**64 - 1), (0.5, 1.5)), Wait(None, "", (), ()))),
            pb.Waits(
                waits=[
                    pb.Wait(reason=WAIT_REASON_QUEUE, message="m", streams=[1, 2**64 - 1], seconds=[0.5, 1.5]),
                    pb.Wait(),
                ]
            ),
        ),
        (LOAD, Load(Weights("v", "/f"), ("/a", "/b")), wpb.LoadWeights(version="v", folder="/f", roots=["/a", "/b"])),
        (QUERY, StateQuery(1, frozenset()), pb.RequestsQuery(query=1)),
        (
            QUERY,
            StateQuery(1, frozenset({State.RUNNING, State.WAITING}), Mark(0, 0.0)),
            pb.RequestsQuery(query=1, states=[1, 2], after=pb.RequestsMark()),
        ),
        (
            Codec(pb.Drain, Drain, within=("request",)),
            Drain(3, "w", 2.5, True),
            pb.Drain(query=3, request={"worker": "w", "max_seconds": 2.5, "force": True}),
        ),
        # Zero counts as a value, unset does not.
        (
            Codec(record_pb2.TenantLimits, Limits, other=("name",)),
            Limits(requests_per_minute=0, queue_share=0.5),
            record_pb2.TenantLimits(requests_per_minute=0, queue_share=0.5),
        ),
    ],
)  # fmt: skip
def test_each_kind_of_field_goes_there_and_comes_back(codec: Any, value: Any, message: Any) -> None:
    assert codec.to_message(value) == message
    assert codec.decode(type(message).FromString(message.SerializeToString())) == value


def test_arrays_and_tuples_of_numbers_are_little_endian_bytes() -> None:
    value = Arrays(np.array([2**64 - 1], np.uint64), np.array([1, -2], np.int32), (5, -6))
    message = ARRAYS.to_message(value)
    assert message.streams == b"\xff" * 8 and message.offsets == b"\1\0\0\0\xfe\xff\xff\xff"
    again = ARRAYS.decode(message)
    assert (again.streams.tolist(), again.offsets.tolist(), again.tokens) == ([2**64 - 1], [1, -2], (5, -6))
    assert (again.streams.dtype, again.offsets.dtype) == (np.uint64, np.int32)
    for name in ("streams", "offsets", "tokens"):
        with pytest.raises(WireError, match=f"{name} has 3 bytes, which is not a multiple of "):
            ARRAYS.decode(pb.StepOutput(**{name: b"123"}))


def test_bytes_are_parsed_or_refused() -> None:
    assert parsed(pb.Finish, pb.Finish(stream=1).SerializeToString()) == pb.Finish(stream=1)
    with pytest.raises(WireError, match="the message is not a Finish: "):
        parsed(pb.Finish, b"\xff")
    assert array(packed(np.array([1.5], np.float32)), np.float32, "x").tolist() == [1.5]


@dataclass(frozen=True)
class Unpaired:
    stream: int
    unheard_of: int = 0


@dataclass(frozen=True)
class Bare:
    stream: int


def test_a_field_that_one_class_has_alone_is_declared_or_nothing_is_made() -> None:
    """A field that is added to one class and forgotten in the other fails at the first import."""
    with pytest.raises(TypeError, match=r"^Replaced has no field for Unpaired\.unheard_of$"):
        Codec(pb.Replaced, Unpaired)
    with pytest.raises(TypeError, match=r"^Bare has no field for Admitted\.requests_ahead$"):
        Codec(pb.Admitted, Bare)
    other = {field.name: field.type for field in fields(Plain)} | {"code": Enum("Code", ["ELSEWHERE"])}
    with pytest.raises(KeyError, match="REJECT_CODE_ELSEWHERE"):
        Codec(pb.Rejected, make_dataclass("WithCode", other.items()))
    given = Codec(pb.Replaced, Unpaired, given=("unheard_of",))
    assert given.decode(pb.Replaced(stream=1)) == Unpaired(1)
    assert given.decode(pb.Replaced(stream=1), unheard_of=4) == Unpaired(1, 4)
    assert Codec(pb.Admitted, Bare, other=("requests_ahead",)).to_message(Bare(3)) == pb.Admitted(stream=3)
    made = Codec(
        pb.Replaced, Unpaired, made={"stream": lambda message: 2, "unheard_of": lambda message: message.stream + 1},
        sent={"stream": lambda value: value.unheard_of},
    )  # fmt: skip
    assert made.to_message(Unpaired(1, 5)) == pb.Replaced(stream=5)
    assert made.decode(pb.Replaced(stream=5)) == Unpaired(2, 6)


@pytest.mark.parametrize("number", [0, 7, 2**31 - 1, -1])
def test_a_number_that_is_no_member_is_refused(number: int) -> None:
    with pytest.raises(WireError, match=f"^code is {number}, which is unknown$"):
        PLAIN.decode(pb.Rejected(code=number))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Bounded:
    version: Annotated[str, Length(1, 3)]
    folder: Annotated[str, Cut(4)]
    roots: Annotated[tuple[str, ...], Length(0, 2)]
    keep_rows: bool = False


@dataclass(frozen=True)
class Numbers:
    stream: Annotated[int, Range(2, 9)]
    retry_seconds: Annotated[float, Range(0, 1.5)]
    code: Annotated[bytes, Length(2, 2)] = b""


BOUNDED = Codec(wpb.LoadWeights, Bounded)
NUMBERS = Codec(pb.Rejected, Numbers, given=("code",), other=("code", "message", "field", "tenant_is_full"))


@pytest.mark.parametrize(
    ("codec", "message", "problem"),
    [
        (BOUNDED, wpb.LoadWeights(version=""), "version has 0 characters; it must have 1 to 3"),
        (BOUNDED, wpb.LoadWeights(version="abcd"), "version has 4 characters; it must have 1 to 3"),
        (BOUNDED, wpb.LoadWeights(version="v", roots=["a", "b", "c"]), "roots has 3 entries; the limit is 2"),
        (NUMBERS, pb.Rejected(stream=1), "stream is 1; it must be 2 to 9"),
        (NUMBERS, pb.Rejected(stream=10), "stream is 10; it must be 2 to 9"),
        *(
            (NUMBERS, pb.Rejected(stream=2, retry_seconds=value), f"retry_seconds is {value}; it must be 0 to 1.5")
            for value in (-0.5, float("nan"), float("inf"))
        ),
    ],
)
def test_a_value_out_of_bounds_is_named_with_its_field_and_bounds(codec: Any, message: Any, problem: str) -> None:
    assert BOUNDED.decode(wpb.LoadWeights(version="abc", folder="123456", roots=["a", "b"])).folder == "1234"
    assert NUMBERS.decode(pb.Rejected(stream=9, retry_seconds=1.5)) == Numbers(9, 1.5)
    with pytest.raises(WireError) as raised:
        codec.decode(message)
    assert str(raised.value) == problem


def test_fields_that_contradict_each_other_are_refused_after_each_was_read() -> None:
    def check(value: Bare) -> None:
        if value.stream > 5:
            raise WireError("too large")

    codec = Codec(pb.Replaced, Bare, check=check)
    assert codec.decode(pb.Replaced(stream=5)) == Bare(5)
    with pytest.raises(WireError, match="too large"):
        codec.decode(pb.Replaced(stream=6))


def test_a_message_of_several_has_one_of_them() -> None:
    codec = OneOf(
        pb.FrontendToCore,
        finish=Codec(pb.Finish, Bare, other=("output_tokens",)),
        drain=Codec(pb.Drain, Drain, within=("request",)),
    )
    assert codec.decode(pb.FrontendToCore.FromString(codec.frame(Bare(4)))) == Bare(4)
    assert list(codec.kinds) == [Bare, Drain]
    for other in (pb.FrontendToCore(), pb.FrontendToCore(hello=pb.Hello())):
        with pytest.raises(WireError, match="the message is empty"):
            codec.decode(other)


_Scalar = TypeVar("_Scalar", bound=np.generic)
# As numpy.typing's NDArray: an alias of this kind from numpy 2.5 on, of the older kind before.
_Array = TypeAliasType("_Array", np.ndarray[tuple[Any, ...], np.dtype[_Scalar]], type_params=(_Scalar,))
_Ids = TypeAliasType("_Ids", _Array[np.int32])


@pytest.mark.parametrize("hint", [_Array[np.int32], _Ids])
def test_an_alias_is_the_type_that_it_stands_for(hint: Any) -> None:
    assert unaliased(hint) == np.ndarray[tuple[Any, ...], np.dtype[np.int32]]
    assert unaliased(Annotated[int, Range(0, 1)]) == Annotated[int, Range(0, 1)]
