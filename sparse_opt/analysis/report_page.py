"""The page of `report`, as a Jinja template. Its policy forbids the browser to fetch anything."""

from __future__ import annotations

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 76rem; margin: 0 auto;
  padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-bottom: .2rem; border-bottom: 1px solid #bbb; }
p.note { max-width: 60rem; }
nav a { margin-right: 1.2rem; color: #0b4a82; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; }
dt { color: #555; }
dd { margin: 0; overflow-wrap: anywhere; }
img { display: block; max-width: 100%; height: auto; margin: 1rem 0; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
caption { text-align: left; color: #333; padding: .3rem 0; font-size: 14px; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #e2e2e2; text-align: right; white-space: nowrap; }
th { border-bottom: 1px solid #777; }
th.text, td.text { text-align: left; }
summary { cursor: pointer; color: #0b4a82; }
footer { margin-top: 3rem; color: #555; font-size: 13px; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<dl>
{% for name, value in facts.items() %}
<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}
</dl>
<nav>{% for section in sections %}<a href="#{{ section.key }}">{{ section.title }}</a>{% endfor %}</nav>
{% macro show(table) %}
<div class="wide"><table>
<caption>{{ table.title }}</caption>
<thead><tr>{% for c in table.columns %}
<th scope="col"{% if c.kind == "text" %} class="text"{% endif %}>{{ c.heading }}</th>
{%- endfor %}</tr></thead>
<tbody>
{% for row in table.texts %}
<tr>{% for cell in row %}<td{% if table.columns[loop.index0].kind == "text" %} class="text"{% endif %}>{{ cell }}</td>
{%- endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
{% endmacro %}
{% for section in sections %}
<section id="{{ section.key }}">
<h2>{{ section.title }}</h2>
<p class="note">{{ section.note }}</p>
{% for picture in section.pictures %}
<img src="{{ picture.address }}" alt="{{ picture.text }}">
{% endfor %}
{% for table in section.tables %}
{{ show(table) }}
{% endfor %}
{% for table in section.folded %}
<details><summary>{{ table.title }}</summary>
{{ show(table) }}
</details>
{% endfor %}
</section>
{% endfor %}
<footer>sparse-opt {{ version }}</footer>
</body>
</html>
"""
