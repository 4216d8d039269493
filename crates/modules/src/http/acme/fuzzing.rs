//! Body of the fuzz target `acme_answer`, which sees what is private; the program does not call it.

use serde::Deserialize;

use super::messages::{Account, Authorization, Directory, Order, Problem, RenewalInfo, clean, retry_after, time};
use super::url::Url;

/// Seconds since 1970 of a day in 2026.
const NOW: u64 = 1_795_824_000;

/// Reads bytes as every kind of answer, and as the fields beside it.
pub fn read_answer(bytes: &[u8]) {
    fn read<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Option<T> {
        serde_json::from_slice(bytes).ok()
    }
    if let Some(problem) = read::<Problem>(bytes) {
        check_line(&problem.describe());
    }
    if let Some(Directory { new_nonce, new_account, new_order, .. }) = read(bytes) {
        [new_nonce, new_account, new_order].iter().for_each(|url| check_url(url));
    }
    let _ = read::<Account>(bytes);
    if let Some(order) = read::<Order>(bytes) {
        order.authorizations.iter().chain([&order.finalize]).chain(&order.certificate).for_each(|url| check_url(url));
    }
    if let Some(authorization) = read::<Authorization>(bytes) {
        authorization.challenges.iter().for_each(|challenge| check_url(&challenge.url));
    }
    if let Some(RenewalInfo { suggested_window, explanation_url }) = read(bytes) {
        let _ = (time(&suggested_window.start), time(&suggested_window.end));
        explanation_url.iter().for_each(|url| check_line(&clean(url)));
    }
    let _ = retry_after(bytes, NOW);
    if let Ok(text) = std::str::from_utf8(bytes) {
        check_line(&clean(text));
        check_url(text);
        let _ = time(text);
    }
}

fn check_line(text: &str) {
    assert!(!text.chars().any(char::is_control), "{text:?}");
}

fn check_url(text: &str) {
    let Ok(url) = Url::parse(text) else { return };
    assert_eq!(Url::parse(&url.to_string()).as_ref(), Ok(&url), "{text:?}");
    assert!([&url.target, &url.host_field()].iter().all(|part| part.bytes().all(|byte| byte.is_ascii_graphic())));
}
