"""Plans for people: text tables, what differs between two plans, an ASCII timeline, a page of HTML.

In: plans and simulated steps; nothing here needs torch. Out: rich renderables and text. Whatever a plan says
is untrusted: names are made printable, and the page escapes all of them.
"""
