"""What a replica that is to go asks: is it alone, or does the whole application go?"""

from __future__ import annotations

import logging

from ray import serve
from ray.serve.schema import ApplicationStatus

from serve_apps.messages import Failure

log = logging.getLogger("ray.serve")
GOING_AWAY = Failure("going_away", "the server is shutting down; call again later")


def deleted() -> bool:
    """Whether this replica's application is being deleted, not only this replica."""
    try:
        app = serve.status().applications.get(serve.get_replica_context().app_name)
    except Exception:  # of a controller that starts again, say: conversations are not ended for that
        log.exception("whether the application is being deleted is not known")
        return False
    return app is None or app.status == ApplicationStatus.DELETING
