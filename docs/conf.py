"""Sphinx's configuration. Pages include the repository's Markdown files instead of repeating it."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

import fusedconv

project = "fusedconv"
copyright = "the fusedconv authors"
version = release = fusedconv.__version__

extensions = ["sphinx.ext.autodoc", "myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
pygments_style = "default"

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"

ROOT = Path(__file__).parent.parent
#: Pages that include a file of the repository.
PAGES = {
    "README.md": "index",
    "CONTRIBUTING.md": "contributing",
    "RELEASING.md": "releasing",
    "benchmarks/README.md": "performance",
    "examples/plugin/README.md": "kernels",
}
MEASURED = ("systems", "group_norm", "layers", "models", "processors", "choosing", "hopper")
PAGES |= {f"benchmarks/{name}.md": f"performance/{name}" for name in MEASURED}


def shapes_are_no_emphasis(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Escapes the star of shapes such as [N, C, *spatial] and [N, C, *] outside of literals."""
    for number, line in enumerate(lines):
        parts = re.split(r"(``.*?``)", line)
        parts[::2] = (re.sub(r"(?<![\w*\\])\*(?=[\w\]])", r"\\*", part) for part in parts[::2])
        lines[number] = "".join(parts)


def in_repository(target: str) -> PurePosixPath | None:
    """The file or folder that a link of an included file names; links count from the file."""
    for included in PAGES:
        path = PurePosixPath(included).parent / target
        if (ROOT / path).exists():
            return path
    return None


class FileLinks(SphinxPostTransform):
    """Links of included pages to the repository's files: to the page that shows one, and the bare
    text for any other."""

    default_priority = 8  # before MyST's, which knows files beside the page only

    def run(self, **keywords: Any) -> None:
        for reference in list(self.document.findall(pending_xref)):
            target = reference["reftarget"]
            path = in_repository(target) if reference["reftype"] == "myst" else None
            if path is None:
                continue
            page = path.stem if path.parts[0] == "docs" else PAGES.get(str(path))
            text = reference[0].deepcopy()
            if page is not None:
                uri = self.app.builder.get_relative_uri(self.env.docname, page)
                text = nodes.reference("", "", text, internal=True, refuri=uri)
            reference.replace_self(text)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", shapes_are_no_emphasis)
    app.add_post_transform(FileLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
