//! chart: bars in SVG, by hand: what client 2 got, and how long the probe waited.

use std::fmt::Write as _;

/// One bar for each of two states.
pub struct Bars {
    pub label: String,
    /// Without client 1, and with it.
    pub values: [f64; 2],
}

const WIDTH: f64 = 900.0;
const LABEL_WIDTH: f64 = 220.0;
const BAR_HEIGHT: f64 = 13.0;
const GROUP_HEIGHT: f64 = 38.0;
const PANEL_HEAD: f64 = 44.0;
const COLOURS: [&str; 2] = ["#9bbcd8", "#1f5f99"];

/// A panel for each of `panels`: its title, whether the scale is logarithmic, its bars.
pub fn draw(title: &str, panels: &[(&str, bool, Vec<Bars>)]) -> String {
    let heights = panels.iter().map(|(_, _, bars)| PANEL_HEAD + bars.len() as f64 * GROUP_HEIGHT);
    let height: f64 = 70.0 + heights.sum::<f64>();
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"16\" y=\"26\" font-size=\"17\">{}</text>\n",
        escape(title)
    );
    for (index, text) in ["without client 1", "with client 1"].iter().enumerate() {
        let x = 16.0 + 170.0 * index as f64;
        let colour = COLOURS[index];
        let _ = writeln!(svg, "<rect x=\"{x}\" y=\"40\" width=\"12\" height=\"12\" fill=\"{colour}\"/>");
        let _ = writeln!(svg, "<text x=\"{}\" y=\"51\">{text}</text>", x + 18.0);
    }
    let mut top = 66.0;
    for (title, is_logarithmic, bars) in panels {
        let _ = writeln!(svg, "<text x=\"16\" y=\"{}\" font-weight=\"bold\">{}</text>", top + 22.0, escape(title));
        top += PANEL_HEAD;
        let greatest = bars.iter().flat_map(|bars| bars.values).fold(f64::MIN_POSITIVE, f64::max);
        for bars in bars {
            let _ = writeln!(svg, "<text x=\"16\" y=\"{}\">{}</text>", top + 17.0, escape(&bars.label));
            for (index, &value) in bars.values.iter().enumerate() {
                let width = length(value, greatest, *is_logarithmic) * (WIDTH - LABEL_WIDTH - 90.0);
                let y = top + BAR_HEIGHT * index as f64;
                let colour = COLOURS[index];
                let _ = writeln!(
                    svg,
                    "<rect x=\"{LABEL_WIDTH}\" y=\"{y}\" width=\"{width:.1}\" height=\"{:.0}\" fill=\"{colour}\"/>\n\
                     <text x=\"{:.1}\" y=\"{:.1}\" font-size=\"11\">{}</text>",
                    BAR_HEIGHT - 2.0,
                    LABEL_WIDTH + width + 5.0,
                    y + 10.0,
                    number(value)
                );
            }
            top += GROUP_HEIGHT;
        }
    }
    svg + "</svg>\n"
}

/// From 0 to 1; on a logarithmic scale a tenth of a unit is nothing.
fn length(value: f64, greatest: f64, is_logarithmic: bool) -> f64 {
    const LEAST: f64 = 0.1;
    match is_logarithmic {
        false => value / greatest,
        true => (value.max(LEAST) / LEAST).ln() / (greatest.max(2.0 * LEAST) / LEAST).ln(),
    }
}

fn number(value: f64) -> String {
    if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_has_its_bar() {
        let bars = vec![Bars { label: "a <b>".to_owned(), values: [1.0, 250.0] }];
        let svg = draw("title", &[("panel", true, bars)]);
        assert_eq!(svg.matches("<rect").count(), 1 + 2 + 2);
        assert!(svg.contains("a &lt;b>") && svg.contains(">250<") && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn lengths_are_shares_of_the_greatest() {
        assert_eq!(length(5.0, 10.0, false), 0.5);
        assert_eq!(length(10.0, 10.0, true), 1.0);
        assert_eq!(length(0.0, 10.0, true), 0.0);
    }
}
