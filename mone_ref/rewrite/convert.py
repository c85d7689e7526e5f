"""Convert: the same experts declared in the other form, every tensor byte for byte.

Constants get the names of the target form. One that several experts share becomes one tensor per
expert: the approx form has no other way to say it, and the explicit form needs none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mone_ref import config as config_file
from mone_ref import quantisation, validate
from mone_ref.checkpoint.findings import flaw
from mone_ref.checkpoint.tensor_problem import tensor_problem
from mone_ref.checkpoint.text import some
from mone_ref.config import FILE, Config, NotModelled
from mone_ref.declaration import Named
from mone_ref.errors import Code, Phase, Problem, Rejected, Severity, only_errors, show
from mone_ref.fields import ROOT, Fields
from mone_ref.rewrite import (
    auxiliary,
    config_edit,
    cut,
    mode_pd,
    names,
    output,
    soundness,
    structure,
)
from mone_ref.rewrite import declared as declarations
from mone_ref.rewrite.blueprint import OutputTensor
from mone_ref.rewrite.config_edit import Document
from mone_ref.rewrite.declared import Declared
from mone_ref.rewrite.make import Made
from mone_ref.rewrite.plan import Form
from mone_ref.rewrite.settings import Settings
from mone_ref.rewrite.structure import Structure
from mone_ref.rewrite.uncollected import uncollected

KIND = "convert"
CUSTOM_CLASS = Code.UNKNOWN_FAMILY.group
"""Problems that the names of a custom class give; the stock model's are found anew."""


def as_document(form: Form) -> dict[str, str]:
    """What a manifest says of a conversion, in place of a plan."""
    return {"kind": KIND, "form": str(form)}


def from_document(document: object) -> Form | None:
    """The form that a manifest's plan converts to; None where it is another plan."""
    return next((form for form in Form if document == as_document(form)), None)


@uncollected
def blueprint(directory: Path | str, form: Form, *, scan: bool = False) -> Made:
    """What ``directory`` becomes in another form, or every reason why it does not.

    Reads config.json and headers; writes nothing. With ``scan`` the values that
    ``validate.check`` reads are checked too. Codes: those of a broken checkpoint, and SAME_FORM,
    CONSTANT_NAME, MODEL_FEATURE.
    """
    read = structure.read(directory)
    is_dialect = mode_pd.model_type(read.settings.document) is not None
    source, problems = _stock(read)
    if not only_errors(problems):
        problems += _unsound(source, scan)
    if only_errors(problems):
        return Made(source, None, tuple(problems))
    declared, found = declarations.read(source)
    problems += found
    if not only_errors(problems):
        changes = is_dialect and declared.form is not None
        problems += () if changes else _same_form(declared, form)
        problems += _unfit(source, declared, form)
    copies, omitted = _copies(source, is_dialect)
    problems = list(dict.fromkeys([*problems, *omitted]))
    if only_errors(problems):
        return Made(source, None, tuple(problems))
    config = _config(source, declared, form)
    made = output.assemble(source.checkpoint, _tensors(source, declared, form), config, copies)
    return Made(source, made, tuple(problems))


def _stock(read: Structure) -> tuple[Structure, list[Problem]]:
    """The source with the names of the stock model in its config, whatever dialect it has."""
    document = read.settings.document
    if mode_pd.model_type(document) is None:
        return read, list(read.problems)
    unknown = mode_pd.unknown(document)
    if unknown:
        return read, unknown
    stock = mode_pd.stock(document)
    config, found = _parse(stock)
    kept = [problem for problem in read.problems if problem.code.group != CUSTOM_CLASS]
    problems = list(dict.fromkeys([*kept, *found]))
    return replace(read, settings=Settings(stock), config=config), problems


def _parse(document: Document) -> tuple[Config | None, list[Problem]]:
    """A config that is not a file yet; None for a model that is not in the table."""
    try:
        config = config_file.parse(config_edit.encode(document))
        return config, list(config.findings)
    except NotModelled as limited:
        return limited.config, list(limited.findings)
    except Rejected as rejected:
        limits = config_file.LIMITS
        return None, [problem for problem in rejected.problems if problem.code not in limits]


def _unsound(source: Structure, scan: bool) -> Iterator[Problem]:
    """Tensors against the config: the rules of ``validate``, or those that need no family."""
    if source.config is not None:
        rules = validate.tensor_problems if scan else validate.header_problems
        yield from rules(source.config, source.checkpoint)
    elif source.decoder:
        yield from soundness.problems(source)
    else:
        expected = "experts that are stored one by one"
        yield flaw(Code.MISSING_EXPERT, FILE, ROOT, "no tensor of an expert", expected)
    yield from validate.stored_problems(source.checkpoint, False, ())


def _same_form(declared: Declared, form: Form) -> Iterator[Problem]:
    """Nothing to convert."""
    if declared.form is None or declared.form is form:
        found = f"the {form} form already" if declared.form else "no substituted expert"
        expected = "a checkpoint in the other form"
        yield Problem(Code.SAME_FORM, Phase.PARSE, ROOT, found, expected)


def _unfit(source: Structure, declared: Declared, form: Form) -> Iterator[Problem]:
    """What the target form cannot hold."""
    named = declared.names
    for layer, constants in target_names(source, declared, form).items():
        for expert, name in constants.items():
            if name in source.checkpoint.tensors and name not in named:
                expected = f"a free name for the constant of expert {expert} of layer {layer}"
                code, found = Code.CONSTANT_NAME, "another tensor of that name"
                yield tensor_problem(code, source.checkpoint, name, found, expected)
    for place in quantisation.declared(Fields(source.settings.document, FILE)):
        if form is Form.EXPLICIT and quantisation.is_compressed_tensors(place):
            code, expected = Code.MODEL_FEATURE, "no compressed-tensors beside the explicit form"
            value = show(place.value)
            yield Problem(code, Phase.PARSE, place.path, value, expected, clause="FMT-12")


def target_names(source: Structure, declared: Declared, form: Form) -> Named:
    """The names of all constants in the target form."""
    name = names.constant_name if form is Form.APPROX else names.replacement_name
    targets: Named = {}
    for layer, constants in declared.constants.items():
        block = declarations.block(source, layer)
        targets[layer] = {expert: name(block, expert) for expert in constants}
    return targets


def _tensors(source: Structure, declared: Declared, form: Form) -> dict[str, list[OutputTensor]]:
    """Source file -> its tensors, each whole; a constant once per expert that has it."""
    renamed: dict[str, list[str]] = defaultdict(list)
    targets = target_names(source, declared, form)
    for layer, constants in declared.constants.items():
        for expert, name in constants.items():
            renamed[name].append(targets[layer][expert])
    directory = source.checkpoint.directory
    files: dict[str, list[OutputTensor]] = defaultdict(list)
    for name, entry in source.checkpoint.tensors.items():
        for new in renamed.get(name, [name]):
            files[entry.file].append(cut.whole(entry, directory, new))
    return files


def _copies(source: Structure, is_dialect: bool) -> tuple[tuple[str, ...], list[Problem]]:
    """Auxiliary files; the classes of a dialect would hide the stock model, and stay behind."""
    copies, omitted = auxiliary.find(source.checkpoint.directory)
    left = [path for path in copies if is_dialect and path.endswith(mode_pd.CODE)]
    kept = tuple(path for path in copies if path not in left)
    if not left:
        return kept, list(omitted)
    found, expected = some(left, "file"), "no classes of the dialect: the stock model needs none"
    note = flaw(Code.OMITTED_FILE, left[0], "file", found, expected, Severity.NOTE)
    return kept, [*omitted, note]


def _config(source: Structure, declared: Declared, form: Form) -> Document:
    """config.json of the output; whatever declares nothing keeps its place and value."""
    document = config_edit.without_declaration(source.settings.document)
    if form is Form.APPROX:
        listed = {layer: tuple(constants) for layer, constants in declared.constants.items()}
        return config_edit.with_approx(document, listed)
    known = declarations.layers(source)
    targets = {
        f"{declarations.block(source, layer)}.{names.EXPERTS}": (
            known[layer].num_experts if layer in known else source.num_experts,
            constants,
        )
        for layer, constants in target_names(source, declared, form).items()
    }
    return config_edit.with_explicit(document, targets)
