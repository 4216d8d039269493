const pages = {
    "/page/0": "This is page 0 of the application.",
    "/page/1": "This is page 1 of the application.",
    "/page/2": "This is page 2 of the application.",
    "/page/3": "This is page 3 of the application.",
    "/page/4": "This is page 4 of the application.",
    "/page/5": "This is page 5 of the application.",
    "/page/6": "This is page 6 of the application.",
    "/page/7": "This is page 7 of the application.",
    "/page/8": "This is page 8 of the application.",
    "/page/9": "This is page 9 of the application.",
    "/page/10": "This is page 10 of the application.",
    "/page/11": "This is page 11 of the application.",
    "/page/12": "This is page 12 of the application.",
    "/page/13": "This is page 13 of the application.",
    "/page/14": "This is page 14 of the application.",
    "/page/15": "This is page 15 of the application.",
    "/page/16": "This is page 16 of the application.",
    "/page/17": "This is page 17 of the application.",
    "/page/18": "This is page 18 of the application.",
    "/page/19": "This is page 19 of the application.",
    "/page/20": "This is page 20 of the application.",
    "/page/21": "This is page 21 of the application.",
    "/page/22": "This is page 22 of the application.",
    "/page/23": "This is page 23 of the application.",
    "/page/24": "This is page 24 of the application.",
    "/page/25": "This is page 25 of the application.",
    "/page/26": "This is page 26 of the application.",
    "/page/27": "This is page 27 of the application.",
    "/page/28": "This is page 28 of the application.",
    "/page/29": "This is page 29 of the application.",
    "/page/30": "This is page 30 of the application.",
    "/page/31": "This is page 31 of the application.",
    "/page/32": "This is page 32 of the application.",
    "/page/33": "This is page 33 of the application.",
    "/page/34": "This is page 34 of the application.",
    "/page/35": "This is page 35 of the application.",
    "/page/36": "This is page 36 of the application.",
    "/page/37": "This is page 37 of the application.",
    "/page/38": "This is page 38 of the application.",
    "/page/39": "This is page 39 of the application.",
};

const main = document.getElementById("application");

function show() {
    main.textContent = pages[location.pathname] ?? "Welcome.";
}

addEventListener("popstate", show);
show();
