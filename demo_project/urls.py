from django.conf import settings
from django.contrib import admin
from django.urls import include, path

from demo_project import sync_chat, views

urlpatterns = [
    path("", views.ChatPage.as_view(), name="chat-page"),
    path("side-by-side/", views.SideBySide.as_view(), name="side-by-side"),
    path("chat/", views.ChatView.as_view(), name="chat"),
    path("chat/sync/", sync_chat.SyncChatView.as_view(), name="sync-chat"),
    path("api/chat/", sync_chat.ApiChatView.as_view(), name="api-chat"),
    path("left.json", views.left_in_the_store, name="left"),
    path("accounts/", include("django.contrib.auth.urls")),
    path("admin/", admin.site.urls),
]
if settings.COMPARED_CAPACITY:
    from demo_project import comparisons

    urlpatterns += [
        path("compare/semaphore/", comparisons.SemaphoreChatView.as_view()),
        path("compare/counter/", comparisons.PolledCounterChatView.as_view()),
    ]
