"""The report as one HTML page that needs nothing else. jinja2 comes with torch."""

import base64
from pathlib import Path

from longpack.verify.pictures import draw_boundaries, draw_gradients
from longpack.verify.report import Report

TEMPLATE = Path(__file__).with_name("page.html.jinja")

QUESTIONS = {
    "agreement": "Do all ranks hold the same batch and plan?",
    "inputs": "Is the model given the documents, positions and tokens of the batch?",
    "coverage": "Does every attention layer run under context parallelism?",
    "repeat": "Does the model compute the same thing twice?",
    "boundary": "When one document changes, does any other move?",
    "parity": "Are the split row, the packed row and documents one by one the same?",
    "loss": "Is each rank's loss its part of the mean over all targets?",
    "recompute": "Does activation checkpointing leave gradients alone?",
}


def write_page(report: Report, path: Path) -> Path:
    """Write the report as an HTML page with its pictures inside.

    Args:
        report: of `verify_model`.
        path: of the page; its folder exists.
    """
    from jinja2 import Environment

    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    path.write_text(
        page.render(report=report, questions=QUESTIONS, pictures=draw_pictures(report)),
        encoding="utf-8",
    )
    return path


def draw_pictures(report: Report) -> dict[str, str]:
    """Return the pictures of the checks that have one, as data URIs."""
    drawn = {}
    for result in report.results:
        if result.name == "boundary" and result.ran:
            drawn["boundary"] = draw_boundaries(**result.data)
        if result.name == "parity" and result.ran:
            drawn["parity"] = draw_gradients(
                result.data["all_ranks"],
                result.data["one_rank"],
                result.data["budget"],
                report.settings["world_size"],
            )
    return {name: _data_uri(svg) for name, svg in drawn.items()}


def _data_uri(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
