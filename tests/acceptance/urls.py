"""The demo's pages, and views that behave badly."""

from django.urls import include, path

from . import views

urlpatterns = [
    path("", include("demo_project.urls")),
    path("case/fails/", views.Fails.as_view()),
    path("case/fails/sync/", views.FailsSync.as_view()),
    path("case/fails/drf/", views.FailsInRestFramework.as_view()),
    path("case/endless/", views.Endless.as_view()),
    path("case/blocks/", views.Blocks.as_view()),
    path("case/edit/", views.edit),
]
