"""The numbers of a package that is written here."""

from pathlib import Path

from tests.measure.shape import shape_of

FILES = {
    "__init__.py": "",
    "alone.py": "import os\n",
    "first/__init__.py": "",
    "first/one.py": "from package.second.two import Same\nfrom package import alone\n",
    "first/own.py": "import package.first.one\n\n\nclass Same: ...\n",
    "second/__init__.py": "",
    "second/two.py": "class Same:\n    def f(self, a):\n        return " + " or ".join(["a"] * 14) + "\n",
}


def test_arrows_are_between_rooms_and_counted_once(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shape = shape_of(tmp_path / "package", "package")
    assert shape.rooms == {"alone", "first", "second"}
    assert shape.arrows == {("first", "second"), ("first", "alone")}
    assert shape.fan_out == {"first.one": {"second.two", "alone"}, "first.own": {"first.one"}}
    assert shape.branches == {"second.two.Same.f": 14}
    assert shape.classes == {"Same": 2}
    assert shape.lines == 10
