// Sets the theme before the first paint: the system's, or the user's choice. This script blocks.
// Pages use only <html data-theme> and the event "themechange".
{
  const NAME = "millrace.theme";
  const COLOURS = { light: "#f5f3ec", dark: "#0d1517" };
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const chosen = localStorage.getItem(NAME);
    const theme = chosen in COLOURS ? chosen : system.matches ? "dark" : "light";
    document.documentElement.dataset.theme = theme;
    for (const meta of document.querySelectorAll("meta[name=theme-color]")) meta.content = COLOURS[theme];
    document.dispatchEvent(new Event("themechange"));
  };
  system.addEventListener("change", apply);
  addEventListener("storage", ({ key }) => key === NAME && apply());
  apply();
}
