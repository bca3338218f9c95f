"""Result files: what is in them, how they are written (atomically) and read back (or refused in one line)."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from bench.spec import UsageError

SCHEMA = "dormouse-bench/1"
_TOP = ("schema", "command", "device", "rows")
_ROW = ("op", "case", "params", "mode", "arm", "status")


def _plain(value: Any) -> Any:
    """JSON has no infinities: they travel as strings, so that any JSON reader takes the file."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _revive(value: Any) -> Any:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, dict):
        return {k: _revive(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_revive(v) for v in value]
    return value


def save(path: pathlib.Path, document: Mapping[str, Any]) -> None:
    """Writes beside, then renames: a reader, or a Ctrl-C, never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(_plain(document), indent=1, allow_nan=False) + "\n")
    os.replace(part, path)


def load(path: pathlib.Path) -> dict[str, Any]:
    """A result file. Raises UsageError with one line when it is missing, truncated or not one of ours."""
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a text file") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}: truncated or not JSON (line {error.lineno}: {error.msg})") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise UsageError(f"{path}: not a benchmark result of this project (schema {found!r}, expected {SCHEMA!r})")
    absent = [key for key in _TOP if key not in document]
    rows = document.get("rows", [])
    if not absent and isinstance(rows, list):
        absent = sorted({key for row in rows for key in _ROW if not isinstance(row, dict) or key not in row})
    if absent or not isinstance(rows, list):
        raise UsageError(f"{path}: incomplete: {', '.join(absent) or 'rows'} missing")
    return _revive(document)


def load_folder(folder: pathlib.Path) -> list[tuple[pathlib.Path, dict[str, Any]]]:
    """Every result file of a folder (or the one file given), sorted by name."""
    if folder.is_file():
        return [(folder, load(folder))]
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such file or folder")
    paths = sorted(p for p in folder.glob("*.json"))
    if not paths:
        raise UsageError(f"{folder}: holds no .json result")
    return [(path, load(path)) for path in paths]


def key(row: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    """What makes two rows of different runs comparable: operator, preset, parameters, mode, arm."""
    return (row["op"], row["case"], json.dumps(row["params"], sort_keys=True), row["mode"], row["arm"])


def group(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, ...], list[Any]]:
    """Rows by table (operator, preset, parameters, mode), in order of appearance."""
    out: dict[tuple[str, ...], list[Any]] = {}
    for row in rows:
        out.setdefault(key(row)[:4], []).append(row)
    return out
