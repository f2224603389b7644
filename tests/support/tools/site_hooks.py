"""What MkDocs calls while it builds the site: files that pages lead to are added, and nothing comes from elsewhere."""

from pathlib import Path

import site_links
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[3]


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that pages lead to."""
    pages = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for path in sorted(site_links.outside(pages, _read)):
        if not (ROOT / path).is_file():
            raise PluginError(f"a page links to {path}, which is no file of the repository")
        place = site_links.place(path)
        if place.endswith(".md"):
            text = _read(path) if path.endswith(".md") else site_links.shown(path, _read(path))
            added = File.generated(config, place, content=text, inclusion=InclusionLevel.NOT_IN_NAV)
        else:
            added = File.generated(config, place, abs_src_path=str(ROOT / path))
        files.append(added)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where the site has their targets."""
    place = page.file.src_uri
    at = f"docs/{place}"
    if place.startswith(f"{site_links.COPIED}/"):
        at = place.removeprefix(f"{site_links.COPIED}/")
        if not (ROOT / at).is_file():
            return markdown  # a file that is shown as code
    return site_links.rewritten(markdown, at)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that would fetch anything from another server."""
    found = [f"{file}: {what}" for file, what in site_links.from_elsewhere(Path(config.site_dir))]
    if found:
        raise PluginError("the site fetches from another server:\n" + "\n".join(found))
