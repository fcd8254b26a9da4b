"""Plans and schedules as other engines read them; nothing here needs the other engine, or torch.

``torch_schedules``: tables of ops for ``torch.distributed.pipelining``, and back.
"""
