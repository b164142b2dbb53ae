"""Which nodes take part in a job: they find each other, agree on who is in, and notice who is lost.

Nothing is imported here: ``torchrun`` loads `registry` while torch's own rendezvous is half imported. What
there is: `handler` (what an agent uses), `settings` (how it is configured), `backend` and `etcd_backend`
(where the record is kept), `overview` (the record for people); below them `state` and `operations` (all
decisions, pure), `executor` and `register` (carry them out), `keep_alive` (who is silent).
"""
