//! chart: bar charts in SVG of client 2's throughput and the probe's latency.

use std::fmt::Write as _;

/// A chart: title, meaning of its two colours, panels.
pub struct Chart<'a> {
    pub title: &'a str,
    /// States of the bars, the one with the lighter colour first.
    pub states: [&'a str; 2],
    pub panels: Vec<Panel>,
}

/// A figure for all servers.
pub struct Panel {
    pub title: &'static str,
    pub is_logarithmic: bool,
    pub bars: Vec<Bars>,
}

/// A bar for each of the two states.
pub struct Bars {
    pub label: String,
    pub values: [f64; 2],
}

const WIDTH: f64 = 900.0;
const MARGIN: f64 = 16.0;
const LABEL_WIDTH: f64 = 220.0;
const BAR_HEIGHT: f64 = 13.0;
const GROUP_HEIGHT: f64 = 38.0;
const PANEL_HEAD: f64 = 44.0;
const TITLE_SIZE: f64 = 17.0;
const TEXT_SIZE: f64 = 13.0;
const COLOURS: [&str; 2] = ["#9bbcd8", "#1f5f99"];

impl Chart<'_> {
    pub fn draw(&self) -> String {
        let heights = self.panels.iter().map(|panel| PANEL_HEAD + panel.bars.len() as f64 * GROUP_HEIGHT);
        let height: f64 = 70.0 + heights.sum::<f64>();
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
             viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"{TEXT_SIZE}\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"{MARGIN}\" y=\"26\" font-size=\"{TITLE_SIZE}\">{}</text>\n",
            escape(self.title)
        );
        let mut x = MARGIN;
        for (text, colour) in self.states.iter().zip(COLOURS) {
            let _ = writeln!(svg, "<rect x=\"{x}\" y=\"40\" width=\"12\" height=\"12\" fill=\"{colour}\"/>");
            let _ = writeln!(svg, "<text x=\"{}\" y=\"51\">{}</text>", x + 18.0, escape(text));
            x += 48.0 + text_width(text, TEXT_SIZE);
        }
        let mut top = 66.0;
        for panel in &self.panels {
            panel.draw(&mut svg, top);
            top += PANEL_HEAD + panel.bars.len() as f64 * GROUP_HEIGHT;
        }
        svg + "</svg>\n"
    }
}

impl Panel {
    fn draw(&self, svg: &mut String, top: f64) {
        let title = escape(self.title);
        let _ = writeln!(svg, "<text x=\"{MARGIN}\" y=\"{}\" font-weight=\"bold\">{title}</text>", top + 22.0);
        let greatest = self.bars.iter().flat_map(|bars| bars.values).fold(f64::MIN_POSITIVE, f64::max);
        for (group, bars) in self.bars.iter().enumerate() {
            let top = top + PANEL_HEAD + group as f64 * GROUP_HEIGHT;
            let _ = writeln!(svg, "<text x=\"{MARGIN}\" y=\"{}\">{}</text>", top + 17.0, escape(&bars.label));
            for (index, (value, colour)) in bars.values.into_iter().zip(COLOURS).enumerate() {
                let width = length(value, greatest, self.is_logarithmic) * (WIDTH - LABEL_WIDTH - 90.0);
                let y = top + BAR_HEIGHT * index as f64;
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
        }
    }
}

/// Returns an upper estimate of a sans-serif text's width, because font metrics are not known here.
fn text_width(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * size * 0.6
}

/// Returns a bar's length from 0 to 1. On a logarithmic scale a tenth of a unit has length 0.
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

    fn chart(title: &str) -> Chart<'_> {
        let bars = vec![Bars { label: "a <b>".to_owned(), values: [1.0, 250.0] }];
        Chart {
            title,
            states: ["alone", "together"],
            panels: vec![Panel { title: "panel", is_logarithmic: true, bars }],
        }
    }

    #[test]
    fn every_value_has_its_bar() {
        let svg = chart("title").draw();
        assert_eq!(svg.matches("<rect").count(), 1 + 2 + 2);
        assert!(svg.contains("a &lt;b>") && svg.contains(">250<") && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn titles_of_results_fit_into_the_picture() {
        for title in super::super::TITLES.iter().flatten() {
            assert!(MARGIN + text_width(title, TITLE_SIZE) <= WIDTH, "{title}");
        }
        for title in super::super::PANEL_TITLES {
            assert!(MARGIN + text_width(title, TEXT_SIZE) <= WIDTH, "{title}");
        }
    }

    #[test]
    fn lengths_are_shares_of_the_greatest() {
        assert_eq!(length(5.0, 10.0, false), 0.5);
        assert_eq!(length(10.0, 10.0, true), 1.0);
        assert_eq!(length(0.0, 10.0, true), 0.0);
    }
}
