from django.urls import path

from .views import KINDS

urlpatterns = [
    path(f"{kind}/{body}/", view) for kind, view in KINDS.items() for body in ("plain", "streamed")
]
