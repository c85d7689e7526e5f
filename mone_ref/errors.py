"""What can be wrong with a checkpoint, and when it is noticed.

A *problem* is one fact about one place in one file. Readers collect every
problem they can see before they raise, so that a user mends a file once.
Codes have two levels, ``GROUP/detail``: the group is what conformance cases
compare across engines, the detail is for people.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """When a fault is noticed, in the order of an engine's life."""

    PARSE = "parse"  # config.json alone
    INIT = "init"  # the model is about to be built
    LOAD = "load"  # tensors are read
    RUN = "run"  # a prompt is scored
    UPDATE = "update"  # direct update of a loaded model
    RELOAD = "reload"  # layerwise reload of a loaded model


class Severity(StrEnum):
    """How much a problem matters: only errors stop a load."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Code(StrEnum):
    """Every kind of problem, as ``GROUP/detail``, with one sentence each."""

    doc: str

    def __new__(cls, value: str, doc: str) -> Code:
        """A member whose value is the code and whose ``doc`` is its sentence."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.doc = doc
        return member

    # -- the directory and its files
    NOT_A_CHECKPOINT = "CHECKPOINT/not-a-directory", "The path is not a readable directory."
    NO_CONFIG = "CHECKPOINT/no-config", "The directory holds no config.json."
    NO_WEIGHTS = "CHECKPOINT/no-weights", "The directory holds no safetensors file."
    UNREADABLE = "CHECKPOINT/unreadable", "A file cannot be opened or read."
    PICKLE = "CHECKPOINT/pickle", "Weights are stored as pickle, which is never opened."
    AMBIGUOUS_FILES = (
        "CHECKPOINT/ambiguous-files",
        "Several sets of weight files lie side by side and no index tells which one counts.",
    )
    STRAY_FILE = "CHECKPOINT/stray-file", "A weight file that the index does not name."
    HEADER = "CHECKPOINT/header", "A safetensors header is malformed."
    TRUNCATED = "CHECKPOINT/truncated", "A file is shorter or longer than its header says."
    OFFSETS = "CHECKPOINT/offsets", "Tensor byte ranges overlap, leave holes or do not fit."
    METADATA = "CHECKPOINT/metadata", "The safetensors metadata is missing or not text."
    LFS_POINTER = "CHECKPOINT/lfs-pointer", "A Git LFS pointer stands where a file belongs."
    ALIGNMENT = "CHECKPOINT/alignment", "Tensors start at odd offsets: legal, read by copying."
    MISSING_SHARD = "CHECKPOINT/missing-shard", "A shard that the set or the index names is absent."
    INDEX = "CHECKPOINT/index", "The shard index is malformed or disagrees with the shards."
    UNSAFE_PATH = "CHECKPOINT/unsafe-path", "A file name leaves the checkpoint directory."
    DUPLICATE_TENSOR = "CHECKPOINT/duplicate-tensor", "Two files store the same tensor name."

    # -- config.json as JSON
    JSON_SYNTAX = "CONFIG_JSON/syntax", "The file is not valid JSON."
    JSON_DUPLICATE_KEY = "CONFIG_JSON/duplicate-key", "An object names one key twice."
    JSON_NOT_OBJECT = "CONFIG_JSON/not-an-object", "The document is not a JSON object."

    # -- config.json as a model
    UNKNOWN_FAMILY = "CONFIG_MODEL/unknown-family", "No architecture of the table is named."
    MODEL_FIELD = "CONFIG_MODEL/field", "A field of the model is missing or has a wrong value."
    MODEL_FIELD_CONFLICT = "CONFIG_MODEL/conflict", "Two holders of one field disagree."
    MODEL_FEATURE = "CONFIG_MODEL/feature", "The model asks for something not implemented here."

    # -- the substitution list
    NOT_A_MAPPING = "SUBSTITUTION/not-a-mapping", "The list is not a JSON object."
    LAYER_KEY = "SUBSTITUTION/layer-key", "A layer key is not a canonical decimal string."
    NOT_A_LIST = "SUBSTITUTION/not-a-list", "A layer's value is not an array (or null)."
    ID_TYPE = "SUBSTITUTION/id-type", "An expert id is not a JSON integer."
    ID_DUPLICATE = "SUBSTITUTION/id-duplicate", "An expert id is listed twice in a layer."
    ID_RANGE = "SUBSTITUTION/id-range", "An expert id is negative or not below the expert count."
    ALL_SUBSTITUTED = "SUBSTITUTION/all-substituted", "A layer retains no expert."
    LAYER_NOT_MOE = "SUBSTITUTION/layer-not-moe", "A listed layer is no MoE layer of the model."
    BOTH_FORMS = "SUBSTITUTION/both-forms", "Both declaration forms are present."
    EXPLICIT_FORM = "SUBSTITUTION/explicit-form", "An object of the explicit form is missing."
    VERSION = "SUBSTITUTION/version", "The explicit form has another version than 1."
    ROUTER_SEMANTICS = "SUBSTITUTION/router-semantics", "The routing rule is another one."
    TARGET_PATH = "SUBSTITUTION/target-path", "A target path does not hold one layer index."
    TARGET_UNBOUND = "SUBSTITUTION/target-unbound", "A target path names no experts of the decoder."
    TARGET_REPEATED = "SUBSTITUTION/target-repeated", "Two targets name one layer."
    EXPERT_COUNT = "SUBSTITUTION/expert-count", "num_logical_experts is not the model's count."
    WEIGHT_LAYOUT = "SUBSTITUTION/weight-layout", "The layout of weights is another one."
    ID_KEY = "SUBSTITUTION/id-key", "A replacement's key is not a canonical decimal string."
    REPLACEMENT_FORMAT = "SUBSTITUTION/replacement-format", "A replacement is no constant."
    CONSTANT_NAME = "SUBSTITUTION/constant-name", "The name of a constant cannot be one."
    MISPLACED = "SUBSTITUTION/misplaced", "A declaration stands where it does not count."
    PLACEMENT_CONFLICT = (
        "SUBSTITUTION/placement-conflict",
        "The text config and the top level declare different lists.",
    )
    PLACEMENT_COPY = (
        "SUBSTITUTION/placement-copy",
        "The text config and the top level declare the same list.",
    )
    UNKNOWN_KEY = "SUBSTITUTION/unknown-key", "A key that resembles a declaration; it is not read."
    DIALECT = "SUBSTITUTION/dialect", "A declaration in a dialect that is recognised but not read."
    EVOLVING = "SUBSTITUTION/evolving", "Constants that change while the model runs."

    # -- tensors against the list
    MISSING_CONSTANT = "MISSING_CONSTANT/absent", "A substituted expert has no constant."
    CONSTANT_SHAPE = "CONSTANT_SHAPE/shape", "A constant is not one vector of hidden_size."
    CONSTANT_DTYPE = "CONSTANT_SHAPE/dtype", "A constant is not stored in a float type."
    NON_FINITE_CONSTANT = "NON_FINITE_CONSTANT/stored", "A constant holds NaN or infinity."
    CONSTANT_OVERFLOW = (
        "NON_FINITE_CONSTANT/overflow",
        "A constant becomes infinite in the dtype in which parameters are held.",
    )
    UNLISTED_CONSTANT = "UNLISTED_CONSTANT/retained", "A constant for an expert that is retained."
    UNNAMED_CONSTANT = (
        "UNLISTED_CONSTANT/unnamed",
        "A constant under a derived name that the explicit form does not name.",
    )
    UNLISTED_LAYER = "UNLISTED_CONSTANT/layer", "A constant in a layer that is not listed."
    MISSING_EXPERT = "EXPERT_WEIGHTS/missing", "A retained expert lacks a projection."
    FUSED_EXPERTS = "EXPERT_WEIGHTS/fused", "Fused expert tensors on a substituted layer."
    LEFTOVER_EXPERT = "EXPERT_WEIGHTS/leftover", "A substituted expert still stores projections."
    MISSING_TENSOR = "MODEL_WEIGHTS/missing", "A tensor that the model needs is absent."
    TENSOR_SHAPE = "MODEL_WEIGHTS/shape", "A tensor has another shape than the config implies."
    LAYER_KINDS = "MODEL_WEIGHTS/layer-kinds", "Experts are stored in other layers than configured."
    TIED_HEAD = (
        "MODEL_WEIGHTS/tied-head",
        "An output head is stored although the config ties it to the embeddings.",
    )
    NON_FINITE_ROUTER = "MODEL_WEIGHTS/non-finite", "A router weight holds NaN or infinity."
    ROUTER_MASK = "MODEL_WEIGHTS/router-mask", "A router row was overwritten with one huge value."
    NON_FINITE_WEIGHT = (
        "MODEL_WEIGHTS/non-finite-weight",
        "A weight that only a full scan reads holds NaN or infinity.",
    )
    ORPHAN = (
        "MODEL_WEIGHTS/orphan",
        "Half of a quantised weight: a scale without its weight, or values without their scale.",
    )
    DECODER_PATH = "MODEL_WEIGHTS/decoder-path", "The decoder lies under another path."
    TENSOR_DTYPE = "MODEL_WEIGHTS/dtype", "A tensor is stored in a type that cannot be computed."
    TWO_SOURCES = "MODEL_WEIGHTS/two-sources", "Different stored tensors make one of the model."
    UNKNOWN_TENSOR = "MODEL_WEIGHTS/unknown", "A tensor that the model does not use."

    # -- plans and rewrites
    PLAN_FILE = "PLAN/file", "A plan, a score file or a constants file cannot be read as one."
    PLAN_FIELD = "PLAN/field", "A field of a plan is missing, unknown or has a wrong value."
    PLAN_LAYER = "PLAN/layer", "A plan names another set of layers than has experts."
    PLAN_EXPERTS = "PLAN/experts", "A plan's list of experts is none of the layer's."
    PLAN_COUNTS = "PLAN/counts", "Pruned layers would keep different numbers of experts."
    PLAN_TOP_K = "PLAN/top-k", "Tokens would be routed to more experts than are kept."
    PLAN_GROUPS = "PLAN/groups", "The kept experts do not fit the router's expert groups."
    PLAN_EMPTY = "PLAN/empty", "A plan that changes nothing."
    PLAN_CONSTANTS = "PLAN/constants", "The constants of a plan are not those that it needs."
    PLAN_SCORES = "PLAN/scores", "Scores that do not rank the experts."
    CANNOT_CUT = "REWRITE/cut", "A tensor cannot be cut as whole byte ranges."
    MTP_POLICY = "REWRITE/mtp", "What becomes of MTP layers with experts is not said, or not done."
    ALREADY_SUBSTITUTED = "REWRITE/substituted", "The source has substituted experts already."
    ENGINE_LIMIT = "REWRITE/engine", "The output is well formed, but engines may not load it."
    SAME_FORM = "REWRITE/same-form", "A conversion that would change nothing."
    OMITTED_FILE = "REWRITE/omitted-file", "Files of the source that are not copied."

    # -- outputs of a rewrite
    OUTPUT_EXISTS = "OUTPUT/exists", "Something is already where the output would appear."
    OUTPUT_PLACE = "OUTPUT/place", "The output would lie in the source, around it, or nowhere."
    OUTPUT_BUSY = "OUTPUT/busy", "Another rewrite works on the same output."
    OUTPUT_PARTIAL = "OUTPUT/partial", "An unfinished output of another rewrite is there."
    OUTPUT_WRITE = "OUTPUT/write", "The output cannot be written: space, permission, the disk."
    SOURCE_CHANGED = "SOURCE/changed", "A file of the source changed while it was rewritten."
    OUTPUT_BYTES = "OUTPUT/bytes", "Stored bytes of an output are not those of its source."
    OUTPUT_TENSORS = "OUTPUT/tensors", "An output has other tensors, types or shapes than planned."
    OUTPUT_FILES = "OUTPUT/files", "An output has other files than planned."
    OUTPUT_DOCUMENT = "OUTPUT/document", "config.json or the index is not as planned."
    MANIFEST = "OUTPUT/manifest", "The manifest is missing, malformed, or of another output."

    # -- requests
    UNSUPPORTED_FEATURE = "UNSUPPORTED/feature", "A feature that substitution excludes."
    UNSUPPORTED_RELOAD = "UNSUPPORTED/layerwise-reload", "Layerwise reload is refused."
    RANKS = "UNSUPPORTED/ranks", "A size of the model does not divide among the ranks asked for."
    UPDATE_TARGET = "UPDATE/unknown-name", "An update names no constant of the model."

    @property
    def group(self) -> str:
        """The part that cases compare: ``MISSING_CONSTANT`` of ``MISSING_CONSTANT/absent``."""
        return self.value.partition("/")[0]

    @property
    def detail(self) -> str:
        """The part for people: ``absent`` of ``MISSING_CONSTANT/absent``."""
        return self.value.partition("/")[2]


TOOL_GROUPS = frozenset({"PLAN", "REWRITE", "SOURCE", "OUTPUT"})
"""Groups of the checkpoint tools: no engine refuses with one of them."""

GROUPS = frozenset(code.group for code in Code) - TOOL_GROUPS
"""Groups that cases compare across engines."""


@dataclass(frozen=True)
class Problem:
    """One fault at one place.

    ``where`` is a JSON path (``$.approximate_experts["1"][0]``) for a config
    and a tensor name for weights; ``file`` is relative to the checkpoint.
    """

    code: Code
    phase: Phase
    where: str
    found: str
    expected: str
    file: str = "config.json"
    severity: Severity = Severity.ERROR
    clause: str = ""

    def __str__(self) -> str:
        clause = f" [{self.clause}]" if self.clause else ""
        return (
            f"{self.severity} {self.code} ({self.phase}) {self.file}: {self.where}: "
            f"found {self.found}, expected {self.expected}{clause}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The problem as JSON-ready data, the code whole and split in group and detail."""
        split = {"group": self.code.group, "detail": self.code.detail}
        return {**asdict(self), "code": str(self.code), **split}


def only_errors(problems: Iterable[Problem]) -> list[Problem]:
    """Those that stop a load or a command."""
    return [problem for problem in problems if problem.severity is Severity.ERROR]


def reason(error: Exception) -> str:
    """What the system says of a call that failed, or else the exception itself."""
    return getattr(error, "strerror", None) or str(error)


class Rejected(Exception):
    """Refusal of an input, with every problem that was found.

    Raised by the config reader, the loader, updates and reloads. ``problems``
    is never empty and holds errors only.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        if not self.problems:
            raise ValueError("a rejection needs at least one problem")
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[Rejected], tuple[tuple[Problem, ...]]]:
        """Made again from its problems when it crosses to another process, not from its text."""
        return type(self), (self.problems,)

    @property
    def phase(self) -> Phase:
        """Earliest phase among the problems."""
        order = list(Phase)
        return min((problem.phase for problem in self.problems), key=order.index)

    @property
    def codes(self) -> tuple[Code, ...]:
        """Codes of all problems, in the order found."""
        return tuple(problem.code for problem in self.problems)


def show(value: object, limit: int = 80) -> str:
    """A value from a user's file, safe to print: escaped, one line, cut to ``limit``.

    Lone surrogates and control characters of broken files must not break the
    message that reports them.
    """
    text = ascii(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
