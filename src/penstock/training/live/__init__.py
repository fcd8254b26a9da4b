"""Learning from a live stream: frames come when they come, and results leave as soon as they are
there.

``stream`` is the way in, beside ``Pipeline`` and on the same engine. ``intake`` reads a source, has
the frames that wait for the first stage, and drops some if it must; a ``loop`` lets them in, of
which there are two in ``loops``, for threads and for processes; the last stage's forward tells the
result (``run.minibatch.FrameListener``), long before the frame's backward has come to the first
stage. ``report`` keeps account.

Decided here: frames are dropped in front of the first stage only, since a layer may carry state
from frame to frame; between processes rank 0 decides, and the others follow its orders, so that
only rank 0 needs the camera.
"""

from typing import TYPE_CHECKING

from penstock.base.lazily import loaded_when_used

if TYPE_CHECKING:
    from penstock.training.live.intake import Result
    from penstock.training.live.opening import stream
    from penstock.training.live.report import StreamReport
    from penstock.training.live.streams import Stream

__all__ = ["Result", "Stream", "StreamReport", "stream"]

__getattr__ = loaded_when_used(
    __name__,
    {
        "penstock.training.live.intake": ("Result",),
        "penstock.training.live.report": ("StreamReport",),
        "penstock.training.live.opening": ("stream",),
        "penstock.training.live.streams": ("Stream",),
    },
)
