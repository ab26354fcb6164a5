"""A mutation: one fault that is put into the source, and what should detect it. Owns its description only."""

from dataclasses import dataclass

from tests.mutations.edits import Edit


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A fault; `module` is the dotted name of the module that the edits change.

    `test` names the tests that must detect it, separated by spaces. If it is empty, the simulation or any test of the
    core may.
    """

    name: str
    breaks: str
    module: str
    edits: tuple[Edit, ...]
    test: str = ""

    @property
    def path(self) -> str:
        """The module's file, relative to the checkout."""
        return f"{self.module.replace('.', '/')}.py"
