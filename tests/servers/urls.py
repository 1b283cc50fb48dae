from django.urls import path

from . import chats
from .views import KINDS, set_capacity

urlpatterns = [
    path("capacity/", set_capacity),
    *chats.urlpatterns,
    *(
        path(f"{kind}/{body}/", view)
        for kind, view in KINDS.items()
        for body in ("plain", "streamed")
    ),
]
