"""What a request gives back before it waits or streams: it holds its ticket and nothing else."""

from __future__ import annotations

from asgiref.sync import AsyncToSync, SyncToAsync, sync_to_async
from django.db import connections


def give_back_connections() -> bool:
    """Hold no database connection while waiting; False where a transaction needs one."""
    found = list(connections.all(initialized_only=True))
    for connection in found:
        if not connection.in_atomic_block:
            connection.close()
    return not any(connection.in_atomic_block for connection in found)


async def agive_back_connections() -> None:
    """Hold neither a database connection nor, under ASGI, a thread while waiting.

    There, each request has a thread of its own for the sync code that it meets (its session's
    queries, say), and would keep it to its end. The next sync code gets a new one.
    """
    context = SyncToAsync.thread_sensitive_context.get(None)
    threads = SyncToAsync.context_to_thread_executor
    is_ours = context is not None and getattr(AsyncToSync.executors, "current", None) is None
    if is_ours and context not in threads:
        return
    is_idle = await sync_to_async(give_back_connections)()
    if is_idle and is_ours and context and getattr(context, "_executor", None) is None:
        thread = threads.pop(context, None)
        if thread is not None:
            thread.shutdown(wait=False)
