"""A server's orders and replies: one row an order in SQLite, and each body in a file as it was sent.

The run's process, on the server's machine, writes the body of an order into ``messages/`` and reads a reply from there;
requests only name them. Orders of one exchange with equal bodies name one file. A reply grows in ``ORDER.part`` while
it arrives, so that it is continued after a broken connection or a restart of the server.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fedspan.errors import FedspanError

DATABASE, MESSAGES = "orders.db", "messages"
"""The database and the folder of the bodies in the server's folder."""
RANDOM = 16
"""Number of random digits in the name of an order's body, after the run's."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (run TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS orders (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, run TEXT NOT NULL, node INTEGER NOT NULL, head BLOB NOT NULL,
    body TEXT NOT NULL, reply_bytes INTEGER NOT NULL, upload TEXT NOT NULL DEFAULT '', total INTEGER NOT NULL DEFAULT 0,
    is_answered INTEGER NOT NULL DEFAULT 0, failure TEXT
);
CREATE INDEX IF NOT EXISTS open_orders ON orders (node, is_answered, number);
CREATE INDEX IF NOT EXISTS orders_of_runs ON orders (run, is_answered);
CREATE INDEX IF NOT EXISTS orders_of_bodies ON orders (body);
"""


class Order(NamedTuple):
    """An order as it is stored.

    Args:
        body: Name of the file with its body; empty: it has none.
        reply_bytes: Maximum size of its reply, in bytes.
        total: Size of that reply, in bytes.
        failure: Why there is no reply, as the node reports; None: there is one, or none yet.
    """

    id: str
    run: str
    node: int
    head: bytes
    body: str
    reply_bytes: int
    upload: str = ""
    total: int = 0
    is_answered: bool = False
    failure: str | None = None


_COLUMNS = ", ".join(Order._fields)


class Store:
    """The orders of a server, in the only process that changes them."""

    def __init__(self, folder: Path) -> None:
        self.messages = folder / MESSAGES
        self.messages.mkdir(exist_ok=True, mode=0o700)
        try:
            self._database = sqlite3.connect(folder / DATABASE, isolation_level=None)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            problem = f"{folder / DATABASE} cannot be opened ({error}). Is the disk full, or used by another process?"
            if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                problem = f"{folder / DATABASE} is damaged ({error}). Remove it: the runs in progress are then resumed"
            raise FedspanError("server", str(folder), problem=problem) from error
        self._delete_unnamed_files()

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def list_runs(self) -> list[str]:
        """Return the runs that have not ended."""
        return [run for (run,) in self._database.execute("SELECT run FROM runs")]

    def add_run(self, run: str) -> None:
        """Begin a run."""
        self._database.execute("INSERT INTO runs VALUES (?)", (run,))

    def end_run(self, run: str) -> None:
        """End a run, and delete its orders and replies."""
        rows = self._database.execute("SELECT id FROM orders WHERE run = ?", (run,))
        self.delete(run, [id for (id,) in rows])
        self._database.execute("DELETE FROM runs WHERE run = ?", (run,))
        for path in self.messages.glob(f"{run}*"):
            path.unlink(missing_ok=True)

    def add_orders(self, orders: Iterable[Order]) -> None:
        """Store orders."""
        rows = [order[:6] for order in orders]
        with self._begin():
            self._database.executemany(
                "INSERT INTO orders (id, run, node, head, body, reply_bytes) VALUES (?, ?, ?, ?, ?, ?)", rows
            )

    @contextmanager
    def _begin(self) -> Generator[None]:
        """Begin a transaction, which ends with this context."""
        self._database.execute("BEGIN")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def find_next_order(self, node: int) -> Order | None:
        """Return the oldest order of a node that has no reply."""
        return self._find("node = ? AND is_answered = 0 ORDER BY number LIMIT 1", node)

    def find_order(self, id: str, node: int) -> Order | None:
        """Return an order of a node."""
        return self._find("id = ? AND node = ?", id, node)

    def _find(self, condition: str, *values: object) -> Order | None:
        row = self._database.execute(f"SELECT {_COLUMNS} FROM orders WHERE {condition}", values).fetchone()
        return None if row is None else Order(*row)

    def list_open(self, run: str) -> list[tuple[str, int]]:
        """Return the orders of a run that have no reply, with their nodes."""
        return list(self._database.execute("SELECT id, node FROM orders WHERE run = ? AND is_answered = 0", (run,)))

    def list_answered(self, run: str) -> list[tuple[str, str | None]]:
        """Return the orders of a run that have a reply, or the reason why there is none."""
        query = "SELECT id, failure FROM orders WHERE run = ? AND is_answered = 1 ORDER BY number"
        return list(self._database.execute(query, (run,)))

    def count_body_bytes(self, order: Order) -> int:
        """Return the size of an order's body, in bytes."""
        return (self.messages / order.body).stat().st_size if order.body else 0

    def read(self, order: Order, start: int, size: int) -> bytes:
        """Return bytes of an order's message.

        Args:
            size: Number of bytes, if the message has as many.
        """
        content = order.head[start : start + size]
        if order.body and len(content) < size:
            with (self.messages / order.body).open("rb") as file:
                file.seek(max(0, start - len(order.head)))
                content += file.read(size - len(content))
        return content

    def count_received(self, order: Order, upload: str) -> int:
        """Return how many bytes of a reply have arrived."""
        if order.is_answered:
            return order.total
        if order.upload != upload:
            return 0
        try:
            return self._get_part(order).stat().st_size
        except FileNotFoundError:
            return 0

    def begin_reply(self, order: Order, upload: str, total: int) -> None:
        """Begin a reply, in place of another one that has not arrived as a whole."""
        self._get_part(order).unlink(missing_ok=True)
        self._database.execute("UPDATE orders SET upload = ?, total = ? WHERE id = ?", (upload, total, order.id))

    def append(self, order: Order, data: bytes) -> None:
        """Append bytes to a reply that arrives."""
        with self._get_part(order).open("ab") as file:
            file.write(data)

    def finish_reply(self, order: Order) -> None:
        """Finish a reply that has arrived as a whole."""
        self._get_part(order).rename(self.messages / order.id)
        self._database.execute("UPDATE orders SET is_answered = 1 WHERE id = ?", (order.id,))

    def fail(self, order: Order, reason: str) -> None:
        """Store the reason why a node sends no reply."""
        self._get_part(order).unlink(missing_ok=True)
        self._database.execute("UPDATE orders SET is_answered = 1, failure = ? WHERE id = ?", (reason, order.id))

    def delete(self, run: str, ids: Collection[str]) -> None:
        """Delete orders of a run with their replies; ids of other orders are ignored."""
        if not ids:
            return
        bodies, unused = set[str](), list[Path]()
        with self._begin():
            for id in ids:
                query = "DELETE FROM orders WHERE id = ? AND run = ? RETURNING body"
                for (body,) in self._database.execute(query, (id, run)).fetchall():
                    bodies.add(body)
                    unused += [self.messages / id, self.messages / f"{id}.part"]
        for path in unused:
            path.unlink(missing_ok=True)
        for body in bodies - {""}:
            if self._database.execute("SELECT 1 FROM orders WHERE body = ? LIMIT 1", (body,)).fetchone() is None:
                (self.messages / body).unlink(missing_ok=True)

    def _get_part(self, order: Order) -> Path:
        return self.messages / f"{order.id}.part"

    def _delete_unnamed_files(self) -> None:
        """Delete files of orders that are no longer stored, as after a lost database.

        The bodies of a run that goes on stay, because its process may store one while no server is there.
        """
        named = {id for (id,) in self._database.execute("SELECT id FROM orders")}
        runs = set(self.list_runs())
        for name in os.listdir(self.messages):
            if name.removesuffix(".part") not in named and name[: len(name) - RANDOM] not in runs:
                (self.messages / name).unlink(missing_ok=True)
