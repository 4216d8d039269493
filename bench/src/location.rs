//! location: a typical location, and compressed bodies, with the same configuration for nginx and Gale.
//!
//! The pages are text with a small vocabulary and frequent words, as in a natural language. They are the same in each
//! run.

use crate::client::Headers;
use crate::servers::Setting;

const BROWSER: Headers = &[
    "User-Agent: Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0",
    "Accept: text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
    "Accept-Language: de,en-US;q=0.7,en;q=0.3",
];
const BROWSER_WITH_GZIP: Headers = &[BROWSER[0], BROWSER[1], BROWSER[2], GZIP[0]];
const GZIP: Headers = &["Accept-Encoding: gzip"];

#[derive(Debug, Clone, Copy)]
pub struct Page {
    pub name: &'static str,
    pub title: &'static str,
    pub path: &'static str,
    pub bytes: usize,
    pub headers: Headers,
}

pub const PAGES: [Page; 7] = [
    Page {
        name: "realistic",
        title: "realistic location, 10 KiB with gzip",
        path: "/site/page-10k.html",
        bytes: 10 << 10,
        headers: BROWSER_WITH_GZIP,
    },
    Page {
        name: "realistic-plain",
        title: "realistic location, 10 KiB without gzip",
        path: "/site/page-10k.html",
        bytes: 10 << 10,
        headers: BROWSER,
    },
    gzip("gzip-1k", "gzip of 1 KiB", "/gzip/page-1k.html", 1 << 10),
    gzip("gzip-3k", "gzip of 3 KiB", "/gzip/page-3k.html", 3 << 10),
    gzip("gzip-10k", "gzip of 10 KiB", "/gzip/page-10k.html", 10 << 10),
    gzip("gzip-20k", "gzip of 20 KiB", "/gzip/page-20k.html", 20 << 10),
    gzip("gzip", "gzip of 100 KiB", "/gzip/page-100k.html", 100 << 10),
];

const fn gzip(name: &'static str, title: &'static str, path: &'static str, bytes: usize) -> Page {
    Page { name, title, path, bytes, headers: GZIP }
}

const HTTP: &str = "\
    types { text/html html; text/css css; application/javascript js; }
    map $http_accept_language $language { default en; de de; fr fr; }
";

const SERVER: &str = "\
        location ~ \\.php$ { return 403; }
        location ~* /\\.(?:git|svn|ht) { return 404; }
        location /site/ {
            gzip on;
            gzip_vary on;
            gzip_types text/css application/javascript application/json;
            add_header X-Content-Type-Options nosniff;
            add_header X-Frame-Options SAMEORIGIN;
            add_header Referrer-Policy strict-origin-when-cross-origin always;
            add_header Strict-Transport-Security \"max-age=31536000; includeSubDomains\" always;
            add_header X-Language $language;
            access_log access.log combined buffer=32k;
            try_files $uri $uri/index.html =404;
        }
        location /gzip/ { gzip on; }
";

/// Returns the additional server settings for the pages.
pub fn setting() -> Setting {
    Setting { http: HTTP.to_owned(), server: SERVER.to_owned(), ..Setting::default() }
}

/// Returns HTML of exactly this length.
pub fn html(bytes: usize) -> Vec<u8> {
    const SYLLABLES: [&str; 16] =
        ["ta", "ren", "o", "li", "ves", "um", "ka", "der", "i", "son", "pre", "al", "ge", "wi", "tor", "ne"];
    let mut state = 1_u64;
    let mut random = |below: u64| {
        // Knuth's MMIX generator; the upper bits are used.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut text = String::from("<!DOCTYPE html>\n<html lang=\"en\"><head><title>Page</title></head>\n<body>\n");
    while text.len() < bytes {
        let id = random(100_000);
        text.push_str(&format!("<p class=\"text\"><a href=\"/site/{id}.html\">"));
        for number in 0..40 + random(40) {
            // The product of uniformly distributed numbers is mostly small.
            let mut word = random(64) * random(64);
            for _ in 0..=(word + 1).ilog2() / 4 {
                text.push_str(SYLLABLES[(word % 16) as usize]);
                word /= 16;
            }
            text.push_str(if number == 5 { "</a> " } else { " " });
        }
        text.push_str("</p>\n");
    }
    text.truncate(bytes);
    text.into_bytes()
}
