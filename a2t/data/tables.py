"""The manifest as parquet: a column for each field, words as a list of structs.

Fields that few corpora have (turns, native, extra) share the column `more`, as JSON; null where a row has none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from a2t.data.manifest import Row

SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "audio": pa.string(),
        "duration": pa.float64(),
        "speaker": pa.string(),
        "split": pa.string(),
        "words": pa.list_(pa.struct({"word": pa.string(), "start": pa.float64(), "end": pa.float64()})),
        "more": pa.string(),
    }
)
_MORE = ("turns", "native", "extra")
_AT_ONCE = 1024


def table_of(rows: Iterable[Row]) -> pa.Table:
    return pa.Table.from_pylist([_fields(row) for row in rows], schema=SCHEMA)


def iterate_table(path: str | Path) -> Iterator[dict[str, Any]]:
    """Rows as `Row.from_json` takes them. Raises ValueError for a file that is not such a table."""
    with fsspec.open(str(path), "rb") as file:
        try:
            table = pq.ParquetFile(file)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path} is not a parquet file ({error})") from error
        if missing := [name for name in SCHEMA.names if name not in table.schema_arrow.names]:
            raise ValueError(f"{path} has no column {', '.join(missing)}; jobs.prepare makes manifests")
        for batch in table.iter_batches(_AT_ONCE, columns=SCHEMA.names):
            for line in batch.to_pylist():
                more = line.pop("more")
                yield {**line, **(json.loads(more) if more else {})}


def _fields(row: Row) -> dict[str, Any]:
    line = row.to_json()
    more = {name: line.pop(name) for name in _MORE if line.get(name)}
    return {k: line[k] for k in SCHEMA.names if k != "more"} | {"more": json.dumps(more) if more else None}
