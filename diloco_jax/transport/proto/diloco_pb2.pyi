from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProbeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROBE_PING: _ClassVar[ProbeKind]
    PROBE_UP: _ClassVar[ProbeKind]
    PROBE_DOWN: _ClassVar[ProbeKind]

class Lane(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LANE_UNSPECIFIED: _ClassVar[Lane]
    LANE_CONTROL: _ClassVar[Lane]
    LANE_BULK: _ClassVar[Lane]
PROBE_PING: ProbeKind
PROBE_UP: ProbeKind
PROBE_DOWN: ProbeKind
LANE_UNSPECIFIED: Lane
LANE_CONTROL: Lane
LANE_BULK: Lane

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("learner_id",)
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    def __init__(self, learner_id: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("ok", "message")
    OK_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    message: str
    def __init__(self, ok: bool = ..., message: _Optional[str] = ...) -> None: ...

class OperatorRequest(_message.Message):
    __slots__ = ("action", "learner_id", "why")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    action: str
    learner_id: str
    why: str
    def __init__(self, action: _Optional[str] = ..., learner_id: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("learner_id",)
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    def __init__(self, learner_id: _Optional[str] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("config", "layout", "coming", "number", "began_unix_s")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    COMING_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BEGAN_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    config: str
    layout: str
    coming: bool
    number: int
    began_unix_s: float
    def __init__(self, config: _Optional[str] = ..., layout: _Optional[str] = ..., coming: bool = ..., number: _Optional[int] = ..., began_unix_s: _Optional[float] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("learner_id", "layout", "digest", "values")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    layout: str
    digest: int
    values: bytes
    def __init__(self, learner_id: _Optional[str] = ..., layout: _Optional[str] = ..., digest: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class OfferReply(_message.Message):
    __slots__ = ("taken", "message")
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    taken: bool
    message: str
    def __init__(self, taken: bool = ..., message: _Optional[str] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("kind", "probe", "seconds", "noise")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    kind: ProbeKind
    probe: int
    seconds: float
    noise: bytes
    def __init__(self, kind: _Optional[_Union[ProbeKind, str]] = ..., probe: _Optional[int] = ..., seconds: _Optional[float] = ..., noise: _Optional[bytes] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("unix_s", "run_id", "versions", "sessions", "received_bytes", "received_s", "noise", "settings")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_S_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    unix_s: float
    run_id: str
    versions: _containers.ScalarMap[str, str]
    sessions: int
    received_bytes: int
    received_s: float
    noise: bytes
    settings: _containers.ScalarMap[str, str]
    def __init__(self, unix_s: _Optional[float] = ..., run_id: _Optional[str] = ..., versions: _Optional[_Mapping[str, str]] = ..., sessions: _Optional[int] = ..., received_bytes: _Optional[int] = ..., received_s: _Optional[float] = ..., noise: _Optional[bytes] = ..., settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("run_id", "epoch", "sender", "incarnation", "session", "lane", "stripe", "stripes", "host", "hosts", "run")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    STRIPE_FIELD_NUMBER: _ClassVar[int]
    STRIPES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    sender: str
    incarnation: int
    session: int
    lane: Lane
    stripe: int
    stripes: int
    host: int
    hosts: int
    run: str
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sender: _Optional[str] = ..., incarnation: _Optional[int] = ..., session: _Optional[int] = ..., lane: _Optional[_Union[Lane, str]] = ..., stripe: _Optional[int] = ..., stripes: _Optional[int] = ..., host: _Optional[int] = ..., hosts: _Optional[int] = ..., run: _Optional[str] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("header", "hello", "step_report", "fragment_value", "heartbeat", "leave", "welcome", "refuse", "pull_request", "global_fragment", "advance", "stop", "goodbye", "anchor_value", "state_request", "state_chunk", "state_refused", "state_done", "expel", "lease", "anchor_request", "state_pull", "state_end", "state_unavailable", "metrics_report", "evaluate", "score", "evaluate_without", "host_meet", "host_verdict", "host_warm_up", "host_connect", "host_put_batch", "host_step", "host_stage", "host_unstage", "host_send", "host_supersede", "host_adopt", "host_stage_state", "host_unstage_state", "host_leaf", "host_load_state", "host_have", "host_end", "host_answer", "host_want", "host_stop", "host_save", "host_saved", "host_read", "host_restore", "host_loader", "host_evaluate", "host_shared", "host_send_anchor", "host_has", "host_blocks", "host_handled", "host_order", "host_report", "cut_fragment", "chunk", "holdings", "check")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_REPORT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_VALUE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    PULL_REQUEST_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ADVANCE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_VALUE_FIELD_NUMBER: _ClassVar[int]
    STATE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    STATE_CHUNK_FIELD_NUMBER: _ClassVar[int]
    STATE_REFUSED_FIELD_NUMBER: _ClassVar[int]
    STATE_DONE_FIELD_NUMBER: _ClassVar[int]
    EXPEL_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_REQUEST_FIELD_NUMBER: _ClassVar[int]
    STATE_PULL_FIELD_NUMBER: _ClassVar[int]
    STATE_END_FIELD_NUMBER: _ClassVar[int]
    STATE_UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    METRICS_REPORT_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_WITHOUT_FIELD_NUMBER: _ClassVar[int]
    HOST_MEET_FIELD_NUMBER: _ClassVar[int]
    HOST_VERDICT_FIELD_NUMBER: _ClassVar[int]
    HOST_WARM_UP_FIELD_NUMBER: _ClassVar[int]
    HOST_CONNECT_FIELD_NUMBER: _ClassVar[int]
    HOST_PUT_BATCH_FIELD_NUMBER: _ClassVar[int]
    HOST_STEP_FIELD_NUMBER: _ClassVar[int]
    HOST_STAGE_FIELD_NUMBER: _ClassVar[int]
    HOST_UNSTAGE_FIELD_NUMBER: _ClassVar[int]
    HOST_SEND_FIELD_NUMBER: _ClassVar[int]
    HOST_SUPERSEDE_FIELD_NUMBER: _ClassVar[int]
    HOST_ADOPT_FIELD_NUMBER: _ClassVar[int]
    HOST_STAGE_STATE_FIELD_NUMBER: _ClassVar[int]
    HOST_UNSTAGE_STATE_FIELD_NUMBER: _ClassVar[int]
    HOST_LEAF_FIELD_NUMBER: _ClassVar[int]
    HOST_LOAD_STATE_FIELD_NUMBER: _ClassVar[int]
    HOST_HAVE_FIELD_NUMBER: _ClassVar[int]
    HOST_END_FIELD_NUMBER: _ClassVar[int]
    HOST_ANSWER_FIELD_NUMBER: _ClassVar[int]
    HOST_WANT_FIELD_NUMBER: _ClassVar[int]
    HOST_STOP_FIELD_NUMBER: _ClassVar[int]
    HOST_SAVE_FIELD_NUMBER: _ClassVar[int]
    HOST_SAVED_FIELD_NUMBER: _ClassVar[int]
    HOST_READ_FIELD_NUMBER: _ClassVar[int]
    HOST_RESTORE_FIELD_NUMBER: _ClassVar[int]
    HOST_LOADER_FIELD_NUMBER: _ClassVar[int]
    HOST_EVALUATE_FIELD_NUMBER: _ClassVar[int]
    HOST_SHARED_FIELD_NUMBER: _ClassVar[int]
    HOST_SEND_ANCHOR_FIELD_NUMBER: _ClassVar[int]
    HOST_HAS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_HANDLED_FIELD_NUMBER: _ClassVar[int]
    HOST_ORDER_FIELD_NUMBER: _ClassVar[int]
    HOST_REPORT_FIELD_NUMBER: _ClassVar[int]
    CUT_FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    header: Header
    hello: Hello
    step_report: StepReport
    fragment_value: FragmentValue
    heartbeat: Heartbeat
    leave: Leave
    welcome: Welcome
    refuse: Refuse
    pull_request: PullRequest
    global_fragment: GlobalFragment
    advance: Advance
    stop: Stop
    goodbye: Goodbye
    anchor_value: AnchorValue
    state_request: StateRequest
    state_chunk: StateChunk
    state_refused: StateRefused
    state_done: StateDone
    expel: Expel
    lease: Lease
    anchor_request: AnchorRequest
    state_pull: StatePull
    state_end: StateEnd
    state_unavailable: StateUnavailable
    metrics_report: MetricsReport
    evaluate: Evaluate
    score: Score
    evaluate_without: EvaluateWithout
    host_meet: HostMeet
    host_verdict: HostVerdict
    host_warm_up: HostWarmUp
    host_connect: HostConnect
    host_put_batch: HostPutBatch
    host_step: HostStep
    host_stage: HostStage
    host_unstage: HostUnstage
    host_send: HostSend
    host_supersede: HostSupersede
    host_adopt: HostAdopt
    host_stage_state: HostStageState
    host_unstage_state: HostUnstageState
    host_leaf: HostLeaf
    host_load_state: HostLoadState
    host_have: HostHave
    host_end: HostEnd
    host_answer: HostAnswer
    host_want: HostWant
    host_stop: HostStop
    host_save: HostSave
    host_saved: HostSaved
    host_read: HostRead
    host_restore: HostRestore
    host_loader: HostLoader
    host_evaluate: HostEvaluate
    host_shared: HostShared
    host_send_anchor: HostSendAnchor
    host_has: HostHas
    host_blocks: HostBlocks
    host_handled: HostHandled
    host_order: HostOrder
    host_report: HostReport
    cut_fragment: CutFragment
    chunk: Chunk
    holdings: Holdings
    check: bytes
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., step_report: _Optional[_Union[StepReport, _Mapping]] = ..., fragment_value: _Optional[_Union[FragmentValue, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refuse: _Optional[_Union[Refuse, _Mapping]] = ..., pull_request: _Optional[_Union[PullRequest, _Mapping]] = ..., global_fragment: _Optional[_Union[GlobalFragment, _Mapping]] = ..., advance: _Optional[_Union[Advance, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., anchor_value: _Optional[_Union[AnchorValue, _Mapping]] = ..., state_request: _Optional[_Union[StateRequest, _Mapping]] = ..., state_chunk: _Optional[_Union[StateChunk, _Mapping]] = ..., state_refused: _Optional[_Union[StateRefused, _Mapping]] = ..., state_done: _Optional[_Union[StateDone, _Mapping]] = ..., expel: _Optional[_Union[Expel, _Mapping]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., anchor_request: _Optional[_Union[AnchorRequest, _Mapping]] = ..., state_pull: _Optional[_Union[StatePull, _Mapping]] = ..., state_end: _Optional[_Union[StateEnd, _Mapping]] = ..., state_unavailable: _Optional[_Union[StateUnavailable, _Mapping]] = ..., metrics_report: _Optional[_Union[MetricsReport, _Mapping]] = ..., evaluate: _Optional[_Union[Evaluate, _Mapping]] = ..., score: _Optional[_Union[Score, _Mapping]] = ..., evaluate_without: _Optional[_Union[EvaluateWithout, _Mapping]] = ..., host_meet: _Optional[_Union[HostMeet, _Mapping]] = ..., host_verdict: _Optional[_Union[HostVerdict, _Mapping]] = ..., host_warm_up: _Optional[_Union[HostWarmUp, _Mapping]] = ..., host_connect: _Optional[_Union[HostConnect, _Mapping]] = ..., host_put_batch: _Optional[_Union[HostPutBatch, _Mapping]] = ..., host_step: _Optional[_Union[HostStep, _Mapping]] = ..., host_stage: _Optional[_Union[HostStage, _Mapping]] = ..., host_unstage: _Optional[_Union[HostUnstage, _Mapping]] = ..., host_send: _Optional[_Union[HostSend, _Mapping]] = ..., host_supersede: _Optional[_Union[HostSupersede, _Mapping]] = ..., host_adopt: _Optional[_Union[HostAdopt, _Mapping]] = ..., host_stage_state: _Optional[_Union[HostStageState, _Mapping]] = ..., host_unstage_state: _Optional[_Union[HostUnstageState, _Mapping]] = ..., host_leaf: _Optional[_Union[HostLeaf, _Mapping]] = ..., host_load_state: _Optional[_Union[HostLoadState, _Mapping]] = ..., host_have: _Optional[_Union[HostHave, _Mapping]] = ..., host_end: _Optional[_Union[HostEnd, _Mapping]] = ..., host_answer: _Optional[_Union[HostAnswer, _Mapping]] = ..., host_want: _Optional[_Union[HostWant, _Mapping]] = ..., host_stop: _Optional[_Union[HostStop, _Mapping]] = ..., host_save: _Optional[_Union[HostSave, _Mapping]] = ..., host_saved: _Optional[_Union[HostSaved, _Mapping]] = ..., host_read: _Optional[_Union[HostRead, _Mapping]] = ..., host_restore: _Optional[_Union[HostRestore, _Mapping]] = ..., host_loader: _Optional[_Union[HostLoader, _Mapping]] = ..., host_evaluate: _Optional[_Union[HostEvaluate, _Mapping]] = ..., host_shared: _Optional[_Union[HostShared, _Mapping]] = ..., host_send_anchor: _Optional[_Union[HostSendAnchor, _Mapping]] = ..., host_has: _Optional[_Union[HostHas, _Mapping]] = ..., host_blocks: _Optional[_Union[HostBlocks, _Mapping]] = ..., host_handled: _Optional[_Union[HostHandled, _Mapping]] = ..., host_order: _Optional[_Union[HostOrder, _Mapping]] = ..., host_report: _Optional[_Union[HostReport, _Mapping]] = ..., cut_fragment: _Optional[_Union[CutFragment, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., holdings: _Optional[_Union[Holdings, _Mapping]] = ..., check: _Optional[bytes] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("payload_bytes", "offset", "message", "key", "resumed", "digest", "digested")
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DIGESTED_FIELD_NUMBER: _ClassVar[int]
    payload_bytes: int
    offset: int
    message: int
    key: int
    resumed: bool
    digest: int
    digested: bool
    def __init__(self, payload_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., message: _Optional[int] = ..., key: _Optional[int] = ..., resumed: bool = ..., digest: _Optional[int] = ..., digested: bool = ...) -> None: ...

class Holdings(_message.Message):
    __slots__ = ("partials", "digests")
    PARTIALS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    partials: _containers.RepeatedCompositeFieldContainer[PartialPayload]
    digests: bool
    def __init__(self, partials: _Optional[_Iterable[_Union[PartialPayload, _Mapping]]] = ..., digests: bool = ...) -> None: ...

class PartialPayload(_message.Message):
    __slots__ = ("key", "payload_bytes", "start", "stop", "valid_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    VALID_S_FIELD_NUMBER: _ClassVar[int]
    key: int
    payload_bytes: int
    start: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[int]
    valid_s: float
    def __init__(self, key: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., start: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[int]] = ..., valid_s: _Optional[float] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("learner_id", "incarnation", "fingerprint_key", "fingerprint_value", "versions", "digests", "epoch", "step_samples", "granted", "evaluates", "speaks", "run", "corpus", "content", "corpus_samples", "tokenizer", "judges")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_KEY_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_VALUE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    EVALUATES_FIELD_NUMBER: _ClassVar[int]
    SPEAKS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    CORPUS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    CORPUS_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    JUDGES_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    fingerprint_key: _containers.RepeatedScalarFieldContainer[str]
    fingerprint_value: _containers.RepeatedScalarFieldContainer[str]
    versions: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    epoch: int
    step_samples: int
    granted: int
    evaluates: bool
    speaks: int
    run: str
    corpus: str
    content: str
    corpus_samples: int
    tokenizer: str
    judges: bool
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., fingerprint_key: _Optional[_Iterable[str]] = ..., fingerprint_value: _Optional[_Iterable[str]] = ..., versions: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[int]] = ..., epoch: _Optional[int] = ..., step_samples: _Optional[int] = ..., granted: _Optional[int] = ..., evaluates: bool = ..., speaks: _Optional[int] = ..., run: _Optional[str] = ..., corpus: _Optional[str] = ..., content: _Optional[str] = ..., corpus_samples: _Optional[int] = ..., tokenizer: _Optional[str] = ..., judges: bool = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("learner_id", "incarnation", "local_step", "tokens", "global_step", "adopted_version", "adopted_local_step", "adopted_tokens", "step_s", "loss", "samples", "granted", "arrived_fragment_id", "arrived_version", "arrived_ago_s")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_VERSION_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_AGO_S_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    local_step: int
    tokens: int
    global_step: int
    adopted_version: _containers.RepeatedScalarFieldContainer[int]
    adopted_local_step: _containers.RepeatedScalarFieldContainer[int]
    adopted_tokens: _containers.RepeatedScalarFieldContainer[int]
    step_s: float
    loss: float
    samples: int
    granted: int
    arrived_fragment_id: _containers.RepeatedScalarFieldContainer[int]
    arrived_version: _containers.RepeatedScalarFieldContainer[int]
    arrived_ago_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., local_step: _Optional[int] = ..., tokens: _Optional[int] = ..., global_step: _Optional[int] = ..., adopted_version: _Optional[_Iterable[int]] = ..., adopted_local_step: _Optional[_Iterable[int]] = ..., adopted_tokens: _Optional[_Iterable[int]] = ..., step_s: _Optional[float] = ..., loss: _Optional[float] = ..., samples: _Optional[int] = ..., granted: _Optional[int] = ..., arrived_fragment_id: _Optional[_Iterable[int]] = ..., arrived_version: _Optional[_Iterable[int]] = ..., arrived_ago_s: _Optional[_Iterable[float]] = ...) -> None: ...

class MetricsReport(_message.Message):
    __slots__ = ("learner_id", "incarnation", "local_step", "values_name", "values_value")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    VALUES_NAME_FIELD_NUMBER: _ClassVar[int]
    VALUES_VALUE_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    local_step: int
    values_name: _containers.RepeatedScalarFieldContainer[str]
    values_value: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., local_step: _Optional[int] = ..., values_name: _Optional[_Iterable[str]] = ..., values_value: _Optional[_Iterable[float]] = ...) -> None: ...

class FragmentValue(_message.Message):
    __slots__ = ("learner_id", "incarnation", "global_step", "fragment_id", "local_step", "steps", "tokens", "base_version", "payload_bytes", "samples", "since")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    global_step: int
    fragment_id: int
    local_step: int
    steps: int
    tokens: int
    base_version: int
    payload_bytes: int
    samples: int
    since: int
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., global_step: _Optional[int] = ..., fragment_id: _Optional[int] = ..., local_step: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., base_version: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., samples: _Optional[int] = ..., since: _Optional[int] = ...) -> None: ...

class HostBlocks(_message.Message):
    __slots__ = ("learner_id", "incarnation")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class AnchorValue(_message.Message):
    __slots__ = ("learner_id", "incarnation", "fragment_id", "version", "digest", "payload_bytes")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    fragment_id: int
    version: int
    digest: int
    payload_bytes: int
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., fragment_id: _Optional[int] = ..., version: _Optional[int] = ..., digest: _Optional[int] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("learner_id", "incarnation", "number", "global_step", "versions", "loss", "bits_per_byte", "tokens", "scores_name", "scores_value", "took_s", "reason")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    BITS_PER_BYTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCORES_NAME_FIELD_NUMBER: _ClassVar[int]
    SCORES_VALUE_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    number: int
    global_step: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    loss: float
    bits_per_byte: float
    tokens: int
    scores_name: _containers.RepeatedScalarFieldContainer[str]
    scores_value: _containers.RepeatedScalarFieldContainer[float]
    took_s: float
    reason: str
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., number: _Optional[int] = ..., global_step: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ..., loss: _Optional[float] = ..., bits_per_byte: _Optional[float] = ..., tokens: _Optional[int] = ..., scores_name: _Optional[_Iterable[str]] = ..., scores_value: _Optional[_Iterable[float]] = ..., took_s: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("learner_id", "incarnation", "clock", "donor", "donor_step", "part")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    DONOR_FIELD_NUMBER: _ClassVar[int]
    DONOR_STEP_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    clock: int
    donor: str
    donor_step: int
    part: int
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., clock: _Optional[int] = ..., donor: _Optional[str] = ..., donor_step: _Optional[int] = ..., part: _Optional[int] = ...) -> None: ...

class StateChunk(_message.Message):
    __slots__ = ("learner_id", "incarnation", "receiver", "local_step", "part", "parts", "digest", "payload_bytes", "clock")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    receiver: str
    local_step: int
    part: int
    parts: int
    digest: int
    payload_bytes: int
    clock: int
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., receiver: _Optional[str] = ..., local_step: _Optional[int] = ..., part: _Optional[int] = ..., parts: _Optional[int] = ..., digest: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., clock: _Optional[int] = ...) -> None: ...

class StateRefused(_message.Message):
    __slots__ = ("learner_id", "incarnation", "receiver", "reason")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    receiver: str
    reason: str
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., receiver: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class StateDone(_message.Message):
    __slots__ = ("learner_id", "incarnation", "donor")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DONOR_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    donor: str
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., donor: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("learner_id", "incarnation")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("learner_id", "incarnation", "reason")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    reason: str
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("global_step", "versions", "epoch", "schedule_lead", "run")
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_LEAD_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    global_step: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    epoch: int
    schedule_lead: int
    run: str
    def __init__(self, global_step: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ..., epoch: _Optional[int] = ..., schedule_lead: _Optional[int] = ..., run: _Optional[str] = ...) -> None: ...

class Refuse(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Expel(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("first_sample", "start", "stop")
    FIRST_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    first_sample: int
    start: int
    stop: int
    def __init__(self, first_sample: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class AnchorRequest(_message.Message):
    __slots__ = ("fragment_id", "version")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    version: int
    def __init__(self, fragment_id: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Evaluate(_message.Message):
    __slots__ = ("number", "versions")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    number: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ...) -> None: ...

class EvaluateWithout(_message.Message):
    __slots__ = ("number", "fragment_id", "payload_bytes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    number: int
    fragment_id: int
    payload_bytes: int
    def __init__(self, number: _Optional[int] = ..., fragment_id: _Optional[int] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class StatePull(_message.Message):
    __slots__ = ("receiver", "clock", "donor_step", "part")
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    DONOR_STEP_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    receiver: str
    clock: int
    donor_step: int
    part: int
    def __init__(self, receiver: _Optional[str] = ..., clock: _Optional[int] = ..., donor_step: _Optional[int] = ..., part: _Optional[int] = ...) -> None: ...

class StateEnd(_message.Message):
    __slots__ = ("receiver",)
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    receiver: str
    def __init__(self, receiver: _Optional[str] = ...) -> None: ...

class StateUnavailable(_message.Message):
    __slots__ = ("donor", "reason")
    DONOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    donor: str
    reason: str
    def __init__(self, donor: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("global_step", "fragment_id", "local_step")
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    global_step: int
    fragment_id: int
    local_step: int
    def __init__(self, global_step: _Optional[int] = ..., fragment_id: _Optional[int] = ..., local_step: _Optional[int] = ...) -> None: ...

class GlobalFragment(_message.Message):
    __slots__ = ("global_step", "fragment_id", "version", "payload_bytes", "epoch", "digest", "base", "merged_round", "schedule_lead")
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    MERGED_ROUND_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_LEAD_FIELD_NUMBER: _ClassVar[int]
    global_step: int
    fragment_id: int
    version: int
    payload_bytes: int
    epoch: int
    digest: int
    base: int
    merged_round: int
    schedule_lead: int
    def __init__(self, global_step: _Optional[int] = ..., fragment_id: _Optional[int] = ..., version: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., epoch: _Optional[int] = ..., digest: _Optional[int] = ..., base: _Optional[int] = ..., merged_round: _Optional[int] = ..., schedule_lead: _Optional[int] = ...) -> None: ...

class CutFragment(_message.Message):
    __slots__ = ("value", "digest")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    value: GlobalFragment
    digest: int
    def __init__(self, value: _Optional[_Union[GlobalFragment, _Mapping]] = ..., digest: _Optional[int] = ...) -> None: ...

class Advance(_message.Message):
    __slots__ = ("global_step", "schedule_lead")
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_LEAD_FIELD_NUMBER: _ClassVar[int]
    global_step: int
    schedule_lead: int
    def __init__(self, global_step: _Optional[int] = ..., schedule_lead: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("global_step", "reason")
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    global_step: int
    reason: str
    def __init__(self, global_step: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class HostMeet(_message.Message):
    __slots__ = ("island_incarnation", "fingerprint_key", "fingerprint_value")
    ISLAND_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_KEY_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_VALUE_FIELD_NUMBER: _ClassVar[int]
    island_incarnation: int
    fingerprint_key: _containers.RepeatedScalarFieldContainer[str]
    fingerprint_value: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, island_incarnation: _Optional[int] = ..., fingerprint_key: _Optional[_Iterable[str]] = ..., fingerprint_value: _Optional[_Iterable[str]] = ...) -> None: ...

class HostVerdict(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class HostWarmUp(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class HostConnect(_message.Message):
    __slots__ = ("number", "epoch", "session")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    number: int
    epoch: int
    session: int
    def __init__(self, number: _Optional[int] = ..., epoch: _Optional[int] = ..., session: _Optional[int] = ...) -> None: ...

class HostPutBatch(_message.Message):
    __slots__ = ("ranges_start", "ranges_stop", "ahead_start", "ahead_stop")
    RANGES_START_FIELD_NUMBER: _ClassVar[int]
    RANGES_STOP_FIELD_NUMBER: _ClassVar[int]
    AHEAD_START_FIELD_NUMBER: _ClassVar[int]
    AHEAD_STOP_FIELD_NUMBER: _ClassVar[int]
    ranges_start: _containers.RepeatedScalarFieldContainer[int]
    ranges_stop: _containers.RepeatedScalarFieldContainer[int]
    ahead_start: _containers.RepeatedScalarFieldContainer[int]
    ahead_stop: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ranges_start: _Optional[_Iterable[int]] = ..., ranges_stop: _Optional[_Iterable[int]] = ..., ahead_start: _Optional[_Iterable[int]] = ..., ahead_stop: _Optional[_Iterable[int]] = ...) -> None: ...

class HostStep(_message.Message):
    __slots__ = ("clock",)
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    clock: int
    def __init__(self, clock: _Optional[int] = ...) -> None: ...

class HostStage(_message.Message):
    __slots__ = ("fragment_id", "local_step")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    local_step: int
    def __init__(self, fragment_id: _Optional[int] = ..., local_step: _Optional[int] = ...) -> None: ...

class HostUnstage(_message.Message):
    __slots__ = ("fragment_id", "local_step")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    local_step: int
    def __init__(self, fragment_id: _Optional[int] = ..., local_step: _Optional[int] = ...) -> None: ...

class HostSend(_message.Message):
    __slots__ = ("number", "value")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    number: int
    value: FragmentValue
    def __init__(self, number: _Optional[int] = ..., value: _Optional[_Union[FragmentValue, _Mapping]] = ...) -> None: ...

class HostShared(_message.Message):
    __slots__ = ("value", "session", "number", "step")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    value: GlobalFragment
    session: int
    number: int
    step: int
    def __init__(self, value: _Optional[_Union[GlobalFragment, _Mapping]] = ..., session: _Optional[int] = ..., number: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class HostHandled(_message.Message):
    __slots__ = ("handled",)
    HANDLED_FIELD_NUMBER: _ClassVar[int]
    handled: int
    def __init__(self, handled: _Optional[int] = ...) -> None: ...

class HostSupersede(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: GlobalFragment
    def __init__(self, value: _Optional[_Union[GlobalFragment, _Mapping]] = ...) -> None: ...

class HostAdopt(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: GlobalFragment
    def __init__(self, value: _Optional[_Union[GlobalFragment, _Mapping]] = ...) -> None: ...

class HostSendAnchor(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: AnchorValue
    def __init__(self, value: _Optional[_Union[AnchorValue, _Mapping]] = ...) -> None: ...

class HostHas(_message.Message):
    __slots__ = ("value", "reason")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    value: GlobalFragment
    reason: str
    def __init__(self, value: _Optional[_Union[GlobalFragment, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class HostStageState(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: int
    def __init__(self, name: _Optional[int] = ...) -> None: ...

class HostUnstageState(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: int
    def __init__(self, name: _Optional[int] = ...) -> None: ...

class HostLeaf(_message.Message):
    __slots__ = ("number", "name", "leaf")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEAF_FIELD_NUMBER: _ClassVar[int]
    number: int
    name: int
    leaf: str
    def __init__(self, number: _Optional[int] = ..., name: _Optional[int] = ..., leaf: _Optional[str] = ...) -> None: ...

class HostEvaluate(_message.Message):
    __slots__ = ("number", "global_step", "final")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    number: int
    global_step: int
    final: bool
    def __init__(self, number: _Optional[int] = ..., global_step: _Optional[int] = ..., final: bool = ...) -> None: ...

class HostLoadState(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class HostHave(_message.Message):
    __slots__ = ("leaf",)
    LEAF_FIELD_NUMBER: _ClassVar[int]
    leaf: str
    def __init__(self, leaf: _Optional[str] = ...) -> None: ...

class HostEnd(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: int
    def __init__(self, status: _Optional[int] = ...) -> None: ...

class HostSave(_message.Message):
    __slots__ = ("number", "state", "kept")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    number: int
    state: str
    kept: int
    def __init__(self, number: _Optional[int] = ..., state: _Optional[str] = ..., kept: _Optional[int] = ...) -> None: ...

class HostSaved(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class HostRead(_message.Message):
    __slots__ = ("number", "state")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    number: int
    state: str
    def __init__(self, number: _Optional[int] = ..., state: _Optional[str] = ...) -> None: ...

class HostRestore(_message.Message):
    __slots__ = ("number", "fragments")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    number: int
    fragments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., fragments: _Optional[_Iterable[int]] = ...) -> None: ...

class HostLoader(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: str
    def __init__(self, state: _Optional[str] = ...) -> None: ...

class HostAnswer(_message.Message):
    __slots__ = ("number", "reason")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    number: int
    reason: str
    def __init__(self, number: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class HostWant(_message.Message):
    __slots__ = ("leaf", "start", "stop")
    LEAF_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    leaf: str
    start: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, leaf: _Optional[str] = ..., start: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[int]] = ...) -> None: ...

class HostStop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HostOrder(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class HostReport(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("read", "fetched", "entries", "refused", "final")
    READ_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    read: int
    fetched: int
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    refused: str
    final: bool
    def __init__(self, read: _Optional[int] = ..., fetched: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., refused: _Optional[str] = ..., final: bool = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("frame", "bulk", "payload")
    FRAME_FIELD_NUMBER: _ClassVar[int]
    BULK_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    frame: bytes
    bulk: bool
    payload: str
    def __init__(self, frame: _Optional[bytes] = ..., bulk: bool = ..., payload: _Optional[str] = ...) -> None: ...

class Question(_message.Message):
    __slots__ = ("method", "name", "request")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    method: str
    name: str
    request: bytes
    def __init__(self, method: _Optional[str] = ..., name: _Optional[str] = ..., request: _Optional[bytes] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("reply", "problem")
    REPLY_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    reply: bytes
    problem: str
    def __init__(self, reply: _Optional[bytes] = ..., problem: _Optional[str] = ...) -> None: ...
