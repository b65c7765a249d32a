"""Check the files for containers, Kubernetes, systemd and GitHub by their linters and schemas.

    make deploy-files

hadolint reads the Dockerfile, check-jsonschema the Compose files (also that of a data owner's bundle), the workflow,
the forms for issues and CITATION.cff, Helm's own engine renders the chart, kubernetes-validate reads what it renders,
and systemd-analyze the units, where it is installed. No container engine is needed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from string import Template

import helm_python
import kubernetes_validate
import yaml

HERE = Path(__file__).resolve().parent
GITHUB = HERE.parent / ".github"
TEMPLATES = HERE.parent / "src" / "fedspan" / "deployment" / "templates"
BIN = Path(sys.executable).parent
VALUES = {"address": "fl.example.org:9092", "id": "clinic-a", "version": "0.1.0"}
CHARTS = {
    "server": {"server": {"names": ["fl.example.org"]}},
    "server with a web page": {"server": {"names": ["fl.example.org"], "webPort": 8080}},
    "server within a cluster": {"server": {"names": ["fl.example.org"], "service": "ClusterIP"}},
    "node": {"server": {"enabled": False}, "node": {"enabled": True, "bundle": "clinic-a", "data": "messages"}},
}
KUBERNETES = "1.32"


def run(*command: str | Path) -> None:
    """Run a linter; its failure ends the check."""
    print("$", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True)


def render_bundle(folder: Path) -> dict[str, Path]:
    """Write the files of a bundle with values; return their paths by name."""
    paths: dict[str, Path] = {}
    for name in ("compose.yaml", "fedspan-node.service"):
        paths[name] = folder / name
        paths[name].write_text(Template((TEMPLATES / name).read_text()).substitute(VALUES))
    return paths


def check_chart() -> None:
    """Render the chart as a server and as a node, and validate every object."""
    with helm_python.Chart.load(HERE / "helm" / "fedspan") as chart:
        for role, values in CHARTS.items():
            rendered = chart.render(values, name="fl")
            notes = "".join(rendered.pop(name) for name in list(rendered) if name.endswith("NOTES.txt"))
            assert "kubectl exec -n" in notes, f"the notes of a {role} have no command: {notes!r}"
            assert all(word not in notes for word in ("<no value>", "%!")), f"a value is missing in {notes!r}"
            objects = [one for text in rendered.values() for one in yaml.safe_load_all(text) if one]
            kinds = [one["kind"] for one in objects]
            assert "StatefulSet" in kinds, f"the chart of a {role} has no StatefulSet"
            for one in objects:
                kubernetes_validate.validate(one, KUBERNETES, strict=True)
            print(f"chart as {role}: {', '.join(kinds)}", flush=True)
        problem = ""
        try:
            chart.render({"server": {"names": []}}, name="fl")
        except Exception as error:  # the class is the engine's own
            problem = str(error)
        assert "server.names" in problem, f"a chart without server.names is not refused: {problem!r}"


def main() -> None:
    """Run every check."""
    run(BIN / "hadolint", HERE / "Dockerfile")
    with tempfile.TemporaryDirectory() as folder:
        bundle = render_bundle(Path(folder))
        compose = [HERE / "compose.yaml", bundle["compose.yaml"]]
        for schema, files in {
            "compose-spec": compose,
            "github-workflows": sorted(GITHUB.glob("workflows/*.yml")),
            "github-issue-forms": [GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml" for name in ("bug", "feature")],
            "citation-file-format": [HERE.parent / "CITATION.cff"],
        }.items():
            run(BIN / "check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files)
        check_chart()
        if shutil.which("systemd-analyze"):
            units = [HERE / "systemd" / "fedspan-server.service", bundle["fedspan-node.service"]]
            for unit in units:  # fedspan is not installed here
                copy = Path(folder) / "verified" / unit.name
                copy.parent.mkdir(exist_ok=True)
                copy.write_text(unit.read_text().replace("/srv/fedspan/.venv/bin/fedspan", "/usr/bin/env fedspan"))
                run("systemd-analyze", "verify", copy)
        else:
            print("systemd-analyze is not installed: units are not checked")


if __name__ == "__main__":
    main()
