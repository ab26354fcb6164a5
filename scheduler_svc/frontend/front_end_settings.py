"""The settings of a front end, which its parent process passes as flags."""

from dataclasses import dataclass, field

from scheduler_svc.door.tls_files import TlsFiles
from scheduler_svc.frontend.chat.forms import AnswerForm
from scheduler_svc.frontend.grpc_tuning.tuning import ON, Tuning
from scheduler_svc.frontend.request_log import LogRequests
from scheduler_svc.frontend.rpc.calls import CallLimits
from scheduler_svc.frontend.streaming.stream import StreamLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEndSettings:
    """The settings that the parent process passes as flags."""

    endpoint: str
    listen: str
    share_port: bool
    reflection: bool
    max_message_bytes: int
    grace_seconds: float
    stream_limits: StreamLimits = field(default_factory=StreamLimits)
    call_limits: CallLimits = field(default_factory=CallLimits)
    # Whether callers need a token or a known certificate, which the core sends.
    needs_tokens: bool = False
    tls: TlsFiles | None = None
    # The address of the health service alone, in plaintext; "": none.
    health_listen: str = ""
    # Whether requests are measured for the metrics page.
    measures: bool = False
    log_requests: LogRequests = "on"
    tuning: Tuning = ON
    # How answers of chats are parsed, instead of as the checkpoint or its template says.
    answers: AnswerForm | None = None
    # Proves to the core that this process is its front end.
    secret: bytes = field(default=b"", repr=False)
